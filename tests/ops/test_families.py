"""`ops/families`: a few families, all of them (the long form), and the guide's table that it
writes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from ops.model_families import __main__ as command
from ops.model_families import small, table, trial
from ops.model_families.trial import Trial

GUIDE = Path(__file__).parents[2] / "ops" / "guides" / "models.md"
FEW = ("bart", "bloom", "doge", "llama", "mamba", "stablelm")


def lines(text: str) -> dict[str, str]:
    """Return for each family (with its setting) the reason under which it is listed."""
    rows = [row.strip("|").rsplit("|", 1) for row in text.splitlines()[2:]]
    return {name.strip(): reason.strip() for reason, names in rows for name in names.split("·")}


@pytest.fixture(scope="module")
def found() -> list[Trial]:
    return list(command.run_all(list(FEW), jobs=1, time_limit_s=60, fuse=True))


@pytest.mark.slow
def test_a_few_families_are_equal_or_refused(found: list[Trial]) -> None:
    outcomes = {one.name: one.outcome for one in found}
    assert outcomes["llama"] == outcomes["stablelm"] == outcomes["bloom"] == "equal"
    assert outcomes["bart"] == outcomes["doge"] == outcomes["mamba"] == "refused"
    assert set(outcomes.values()) == {"equal", "refused"}


@pytest.mark.slow
def test_trials_of_a_few_families_match_the_guides_table(found: list[Trial]) -> None:
    written = lines(table.current(GUIDE.read_text()))
    assert lines(table.rendered(found)).items() <= written.items()


def test_the_guide_s_table_has_every_family_and_no_wrong_family() -> None:
    written = lines(table.current(GUIDE.read_text()))
    assert {name.split(",")[0] for name in written} == set(small.families())
    assert not [reason for reason in written.values() if reason.startswith(("wrong", "crashed"))]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_family_is_equal_or_refused_as_in_the_guides_table() -> None:
    every = small.families()
    results = list(command.run_all(every, jobs=1, time_limit_s=trial.TIME_LIMIT_S, fuse=True))
    assert not [one for one in results if one.outcome in ("wrong", "crashed")]
    assert lines(table.rendered(results)) == lines(table.current(GUIDE.read_text()))


# ── a trial ──


def tried(monkeypatch: pytest.MonkeyPatch, answers: Any) -> Trial:
    monkeypatch.setattr(trial, "_answers", answers)
    return trial.run("llama", time_limit_s=20)


def test_an_answer_with_other_tokens_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tried(monkeypatch, lambda _f, wanted, _e: [list(one.answer) for one in wanted])
    assert right.outcome == "equal"
    found = tried(
        monkeypatch, lambda _f, wanted, _e: [[one.answer[0] ^ 1, *one.answer[1:]] for one in wanted]
    )
    assert found.outcome == "wrong"
    assert found.reason.startswith("generate answers [")


def test_a_shorter_answer_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        tried(monkeypatch, lambda _f, wanted, _e: [list(one.answer[:-1]) for one in wanted]).outcome
        == "wrong"
    )


def test_a_trial_that_dies_or_hangs_counts_as_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(monkeypatch, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert (found.outcome, found.reason) == ("crashed", "the process ended with status -9")
    monkeypatch.setattr(trial, "_try", lambda *_: time.sleep(60))
    hung = trial.run("llama", time_limit_s=0.5)
    assert (hung.outcome, hung.reason) == ("crashed", "took more than 0 seconds")


def test_processes_of_trials_start_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    start, starting, most = ForkProcess.start, [], []

    def observed(process: ForkProcess) -> None:
        starting.append(process)
        most.append(len(starting))
        time.sleep(0.02)
        start(process)
        starting.remove(process)

    monkeypatch.setattr(ForkProcess, "start", observed)
    monkeypatch.setattr(trial, "_try", lambda *_: ("equal", ""))
    found = command.run_all(["opt"] * 3, jobs=3, time_limit_s=20)
    assert [one.outcome for one in found] == ["equal"] * 3
    assert most == [1, 1, 1]


# ── the table ──


def results() -> Iterator[Trial]:
    yield Trial("opt", "", "equal")
    yield Trial("llama", "", "equal")
    yield Trial(
        "bert",
        "",
        "refused",
        "MODEL cannot be served: layer 0 has keys of size 24; MODEL cannot be served: else",
    )
    yield Trial("bart", "window", "refused", "MODEL cannot be served: layer 1 has keys of size 16")


def test_the_table_joins_families_with_the_same_reason() -> None:
    assert lines(table.rendered(results())) == {
        "llama": "same tokens as `generate`",
        "opt": "same tokens as `generate`",
        "bart, window": "refused: layer n has keys of size n",
        "bert": "refused: layer n has keys of size n",
    }


def test_only_the_text_between_the_markers_is_replaced() -> None:
    guide = f"before\n{table.BEGIN}\n\nold\n\n{table.END}\nafter\n"
    assert table.replaced(guide, "new") == f"before\n{table.BEGIN}\n\nnew\n\n{table.END}\nafter\n"
    assert table.current(guide) == "old"


def test_the_command_prints_the_problem_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        command, "run_all", lambda *_, **__: [Trial("opt", "", "wrong", "generate answers [1]")]
    )
    assert command.main(["opt"]) == 1
    assert "wrong      opt: generate answers [1]" in capsys.readouterr().out
    monkeypatch.setattr(command, "run_all", lambda *_, **__: results())
    assert command.main([]) == 0
    assert "2 equal, 2 refused" in capsys.readouterr().out
