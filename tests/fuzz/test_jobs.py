"""A short form of `ops/fuzz jobs`, and what its checks find."""

import dataclasses
from collections import Counter
from functools import cache

import pytest

from tests.chaos.checker import Received
from tests.fuzz.__main__ import main
from tests.fuzz.jobs.cases import Case
from tests.fuzz.jobs.producer import Submitted
from tests.fuzz.jobs.run import Outcome, fuzz
from tests.fuzz.jobs.service import EndRow
from tests.support.lifecycle import need_valkey
from tokenmill.errors import InvalidRequest
from tokenmill.operations.submit import build_request

GOOD = EndRow("succeeded", "", "", "text")


@cache
def drawn() -> list[Case]:
    return [Case.draw(1, number) for number in range(300)]


def outcome(**changes):
    """A run of one job that went well, with changes."""
    submitted = Submitted(cases={"j": drawn()[0]}, received={"j": read("text")})
    good = Outcome(submitted, {"j": GOOD}, ["j"], {}, [], 0, "[ready]\n")
    return dataclasses.replace(good, **changes)


def read(text, status="succeeded"):
    received = Received(status=status)
    received.texts[0] = text
    return received


# ── drawing ──


def test_a_drawn_job_depends_on_seed_and_number_alone():
    again = [Case.draw(1, number) for number in reversed(range(300))]
    assert [str(case) for case in reversed(again)] == [str(case) for case in drawn()]
    assert Case.draw(2, 7).arguments != drawn()[7].arguments


def test_a_raw_job_has_the_same_bytes_each_time_but_for_its_times():
    timeless = [
        c for c in drawn() if c.is_raw and not {"deadline", "not_before"} & set(c.arguments)
    ]
    for case in timeless:
        first, second = case.script_arguments(), case.script_arguments()
        assert [len(item) for item in first] == [len(item) for item in second]


def test_drawn_jobs_reach_every_field_and_most_pass_the_client():
    named = Counter(name for case in drawn() for name in case.arguments)
    fields = {"messages", "tools", "response_format", "continuations", "prompt_ids", "stop", "n"}
    assert fields <= named.keys()
    passed = 0
    for case in drawn():
        try:
            build_request(case.client_arguments())
        except InvalidRequest:
            continue
        passed += 1
    assert len(drawn()) / 3 < passed < len(drawn())


def test_a_case_is_printed_short_with_the_command_that_repeats_it():
    for case in drawn():
        shown = str(case)
        assert len(shown) < 12_000
        assert shown.endswith(f"ops/fuzz jobs --seed 1 --first {case.number} --count 1")
        shown.encode()  # also where the job has lone surrogates


# ── checks ──


def test_a_run_without_faults_has_no_problems():
    assert list(outcome().problems()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"deaths": ["status -11"]}, "the worker ended, status -11"),
        ({"num_replaced": 2}, "2 engines were replaced"),
        ({"log": "x" * 400 + "Traceback (most recent call last)"}, "the log has a traceback"),
        ({"rows": {}, "billed": [], "stuck": {"j": "running 3"}}, "stuck (running 3): job 0"),
        ({"rows": {"j": EndRow("dead", "dead", "", "text")}}, "dead, dead"),
        ({"rows": {"j": EndRow("failed", "internal_error", "", "")}}, "failed, internal_error"),
        ({"rows": {"j": EndRow("failed", "engine_error", "", "")}}, "failed, engine_error"),
        ({"rows": {"j": GOOD, "k": GOOD}, "billed": ["j", "k"]}, "was never accepted"),
        ({"billed": []}, "'j' has no row of usage"),
        ({"billed": ["j", "j"]}, "'j' has 2 rows of usage"),
        ({"rows": {"j": EndRow("succeeded", "", "", "tex")}}, "a reader received 'text'"),
        ({"rows": {"j": EndRow("expired", "", "", "text")}}, "a reader received succeeded"),
        ({"submitted": Submitted(findings=["submit raised TypeError"])}, "raised TypeError"),
    ],
)
def test_a_fault_of_a_run_is_a_problem(changes, words):
    assert any(words in problem for problem in outcome(**changes).problems())


def test_a_job_refused_for_its_own_error_is_no_problem():
    row = EndRow("failed", "invalid_request", "stop may have 16 strings, not 17", "text")
    rows = {"j": row}
    submitted = Submitted(cases={"j": drawn()[0]}, received={"j": read("text", "failed")})
    assert list(outcome(rows=rows, submitted=submitted).problems()) == []


def test_the_summary_names_every_figure():
    summary = outcome(undisturbed=[1.0] * 100, beside=[2.0] * 100).summary()
    for words in (
        "accepted 1", "ended 1: succeeded 1", "worker deaths 0", "engines replaced 0",
        "stuck jobs 0", "tracebacks 0", "p99 2.0 ×",
    ):  # fmt: skip
        assert words in summary


def test_the_command_of_whole_jobs_has_options_of_its_own(capsys):
    with pytest.raises(SystemExit):
        main(["jobs", "--help"])
    assert "--probe-seconds" in capsys.readouterr().out


@pytest.mark.redis
@pytest.mark.slow
async def test_drawn_jobs_against_a_real_worker_have_no_problems(tmp_path):
    need_valkey()
    found = await fuzz(drawn(), rate=100.0, probe_s=2.0, folder=tmp_path)
    assert list(found.problems()) == []
    assert {"succeeded", "failed", "expired"} <= {row.state for row in found.rows.values()}
    assert found.submitted.by_way["raw"] > 50
    assert found.submitted.by_way["client"] > 50
    assert found.undisturbed
    assert found.beside
