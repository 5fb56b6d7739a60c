"""The order of a file's lines: templates together, no line far behind, and wrong fingerprints."""

import json
import math
import random
from bisect import bisect, insort
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.client.bulk.support import chat, completion, result, write
from tokenmill.bulk import Batch, pending_lines
from tokenmill.bulk.collector import Collector
from tokenmill.bulk.formats.input_file import (
    BadLine,
    BatchDefaults,
    LineSet,
    line_of,
    parse,
    summarise,
    to_request,
)
from tokenmill.bulk.pending_lines import PART_S, PendingLines
from tokenmill.bulk.prefix_order import LENGTHS, fingerprint
from tokenmill_schemas.job import JobRequest

GROUP = 10


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def template(number: int, words: int = 60) -> str:
    draw = random.Random(f"template {number}")
    return " ".join(f"{draw.randrange(10**6)}" for _ in range(words))


def templated(name: str, number: int, **body: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": template(number)},
        {"role": "user", "content": f"row {name}"},
    ]
    return chat(name, messages=messages, **body)


def tool(name: str, description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description}}


def request(line: dict[str, Any]) -> JobRequest:
    made = to_request(_good(line), BatchDefaults("b"))
    assert isinstance(made, JobRequest)
    return made


def _good(line: dict[str, Any]) -> Any:
    return parse(1, json.dumps(line).encode())


def pending(
    path: Path, clock: Callable[[], float] | None = None, collector: Collector | None = None
) -> PendingLines:
    batch = Batch(id="b", queue="q", digest=summarise(path).digest)
    return PendingLines(batch, collector or Collector("b"), LineSet(), GROUP, clock or FakeClock())


def order(path: Path) -> list[int]:
    return [
        number for jobs, bad, _ in pending(path).groups(path, 0) for number in numbers(jobs, bad)
    ]


def numbers(jobs: list[JobRequest], bad: list[BadLine]) -> list[int]:
    return [line_of("b", job.job_id) for job in jobs] + [line.line for line in bad]


def shuffled(path: Path, templates: int, lines: int) -> list[int]:
    """Write a file of lines of several templates in random order; return each line's template."""
    kinds = [number % templates for number in range(lines)]
    random.Random("shuffled").shuffle(kinds)
    write(path, [templated(f"{place}", kind) for place, kind in enumerate(kinds)])
    return kinds


def test_lines_of_a_template_stand_together_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    kinds = shuffled(path, templates=40, lines=400)
    found = order(path)
    assert sorted(found) == list(range(1, 401))
    together = [(kind, list(lines)) for kind, lines in groupby(found, lambda n: kinds[n - 1])]
    assert [kind for kind, _ in together] == list(dict.fromkeys(kinds))
    assert all(lines == sorted(lines) for _, lines in together)


def test_lines_that_share_more_stand_together_within_those_that_share_less(tmp_path: Path) -> None:
    common = template(0)
    texts = [common + template(1 + number % 2) + f" row {number}" for number in range(8)]
    texts.insert(3, template(9))
    path = write(tmp_path / "in.jsonl", [completion(f"{n}", text) for n, text in enumerate(texts)])
    assert order(path) == [1, 3, 6, 8, 2, 5, 7, 9, 4]


def test_lines_of_a_template_are_jobs_of_a_session_and_others_of_none(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    long = 300  # words; a template of 60 is shorter than what is worth a session
    texts = [template(number % 3, long) + f" row {number}" for number in range(9)]
    texts += [template(3, long) + " alone", template(4) + " a", template(4) + " b", "Once"]
    lines = [completion(f"{number}", text) for number, text in enumerate(texts)]
    own = completion("own", template(0, long) + " row", prompt_cache_key="mine")
    write(path, [*lines, own])
    sessions = {
        line_of("b", job.job_id): job.session
        for jobs, _, _ in pending(path).groups(path, 0)
        for job in jobs
    }
    of_templates = [{sessions[line] for line in range(1 + kind, 10, 3)} for kind in range(3)]
    assert [len(names) for names in of_templates] == [1, 1, 1]
    assert len(set.union(*of_templates)) == 3
    assert [sessions[line] for line in range(10, 14)] == [""] * 4
    assert sessions[14] == "mine"


def test_lines_that_share_nothing_keep_the_order_of_the_file(tmp_path: Path) -> None:
    lines: list[Any] = [completion(f"{n}", template(n)) for n in range(20)]
    lines += [completion(f"short {n}", "Once") for n in range(5)]
    assert order(write(tmp_path / "in.jsonl", lines)) == list(range(1, 26))


def test_bad_lines_stand_in_the_order_of_the_file(tmp_path: Path) -> None:
    lines: list[Any] = [templated("a", 1), templated("b", 2), "nonsense", templated("c", 1)]
    path = write(tmp_path / "in.jsonl", lines)
    groups = list(pending(path).groups(path, 0))
    assert [(numbers(jobs, []), [b.line for b in bad]) for jobs, bad, _ in groups if jobs] == [
        ([1, 4, 2], [3])
    ]


@pytest.mark.parametrize(
    "body",
    [
        lambda text: {"tools": [tool("f", text)]},
        lambda text: {"documents": [{"text": text}]},
        lambda text: {"chat_template_kwargs": {"date": text}},
        lambda text: {"model": text[:32]},
    ],
    ids=["tools", "documents", "variables", "model"],
)  # fmt: skip
def test_a_fingerprint_covers_all_that_stands_before_the_row_s_text(
    body: Callable[[str], dict[str, Any]],
) -> None:
    one, same = (templated(name, 1, **body(template(5))) for name in ("a", "b"))
    other = templated("a", 1, **body(template(6)))
    assert fingerprint(request(one))[-2] == fingerprint(request(same))[-2]
    assert fingerprint(request(one))[-2] not in fingerprint(request(other))


def test_a_fingerprint_has_a_digest_a_length_that_the_text_has() -> None:
    assert fingerprint(request(completion("a", "Once"))) == ()
    assert len(fingerprint(request(completion("a", "x" * 10**5)))) == len(LENGTHS)
    assert len(fingerprint(request(completion("a", list(range(60)))))) >= 1
    assert all(short < long for short, long in pairwise(LENGTHS))


@pytest.mark.parametrize(
    "lie",
    [
        lambda _: (),
        lambda _: (b"one for all",) * 3,
        lambda job: tuple(job.job_id[-n:].encode() for n in (1, 2, 3)),
        lambda job: (job.job_id[-1:].encode(), b"x") * random.randrange(3),
    ],
    ids=["nothing", "one for all", "of the id", "twice the same"],
)  # fmt: skip
def test_a_fingerprint_that_lies_changes_only_the_order(
    lie: Callable[[JobRequest], tuple[bytes, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    shuffled(path, templates=7, lines=100)
    monkeypatch.setattr(pending_lines, "fingerprint", lie)
    assert sorted(order(path)) == list(range(1, 101))


def test_no_group_names_a_line_as_reached_before_every_line_up_to_it_was_yielded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_lines, "PART_LINES", 64)
    path = tmp_path / "in.jsonl"
    shuffled(path, templates=7, lines=300)
    path.write_text(path.read_text().replace("\n", "\n" * 100, 1))  # 99 lines that are blank
    seen: set[int] = set(range(2, 101))
    for jobs, bad, reached in pending(path).groups(path, 0):
        lines = numbers(jobs, bad)
        assert not lines or max(lines) <= max(seen, default=0) + 64
        seen.update(lines)
        assert seen.issuperset(range(1, reached + 1))
    assert (seen, reached) == (set(range(1, 400)), 399)


def test_a_run_that_goes_on_repeats_the_order(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    shuffled(path, templates=7, lines=100)
    whole = order(path)
    for count in (1, 30, 77):
        collector = Collector("b")
        collector.take([result("b", line) for line in whole[:count]])
        reached = next(line for line in range(101) if line + 1 not in whole[:count])
        again = pending(path, collector=collector).groups(path, reached)
        assert [n for jobs, bad, _ in again for n in numbers(jobs, bad)] == whole[count:]


def test_a_part_is_no_larger_than_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_lines, "PART_BYTES", 20_000)
    path = tmp_path / "in.jsonl"
    shuffled(path, templates=2, lines=200)
    parts = [reached for jobs, _, reached in pending(path).groups(path, 0) if not jobs]
    assert 4 < len(parts) < 12  # each line has some 600 bytes


@pytest.mark.parametrize("rate", [0.1, 0.5, 3.0])
def test_a_line_waits_at_most_twice_the_stated_time_behind_later_lines(
    rate: float, tmp_path: Path
) -> None:
    """Lines are submitted at `rate` a second, in groups, as places become free."""
    path, count, clock = tmp_path / "in.jsonl", 2_000, FakeClock()
    shuffled(path, templates=40, lines=count)
    late_s, kinds = [], []
    for jobs, _, _ in pending(path, clock).groups(path, 0):
        for job in jobs:
            clock.now += 1 / rate
            late_s.append(clock.now - line_of("b", job.job_id) / rate)
            assert job.messages is not None
            kinds.append(job.messages[0].text)
    assert len(late_s) == count
    assert max(late_s) <= 2 * (PART_S + GROUP / rate)
    num_runs = len(list(groupby(kinds)))
    if rate == 3.0:  # the whole part is submitted in time
        assert num_runs == 40
    else:
        assert num_runs < 40 * (2 + count / (rate * PART_S))


def test_few_lines_overtake_a_line_on_a_day_on_which_people_take_most_places(
    tmp_path: Path,
) -> None:
    """The rate falls from 1 line a second at night to a twentieth of it in the afternoon."""
    path, clock = tmp_path / "in.jsonl", FakeClock()
    shuffled(path, templates=40, lines=20_000)
    ordered: list[int] = []
    most = 0
    for jobs, _, _ in pending(path, clock).groups(path, 0):
        for job in jobs:
            clock.now += 1 / (1 - 0.95 * max(0.0, math.sin(clock.now / 86_400 * 2 * math.pi)))
            line = line_of("b", job.job_id)
            most = max(most, len(ordered) - bisect(ordered, line))
            insort(ordered, line)
    assert (len(ordered), clock.now > 30_000) == (20_000, True)
    assert most <= 2 * (PART_S + GROUP)  # lines, at the highest rate
