"""The simulated fleet: sessions stay at their worker, groups share a cache, tenants have shares."""

from collections.abc import Iterator

import pytest

from ops.benchmarks.commands.simulate import ScriptCosts
from ops.benchmarks.measure.fleet_day import CASES, measure
from ops.benchmarks.measure.fleet_queue import (
    BULK,
    CACHE,
    CHAT,
    HELD_S,
    PLACES,
    PREFILL_S,
    STEP_S,
    Calls,
    Job,
    Queue,
    QueueDay,
    SimulatedWorker,
)


class Given:
    """Jobs at given moments; no chat goes on."""

    def __init__(self, *arrivals: tuple[float, list[Job]]) -> None:
        self._arrivals = arrivals

    def arrivals(self) -> Iterator[tuple[float, list[Job]]]:
        yield from self._arrivals

    def following(self, job: Job) -> None:
        return None


def run(
    *arrivals: tuple[float, list[Job]], workers: int = 2, with_sessions: tuple[int, ...] = (CHAT,)
) -> QueueDay:
    return Queue(workers, 4, Given(*arrivals), with_sessions=with_sessions).run(36 * 3600.0)


def turn(known: int, new: int, *, session: str = "s", tenant: int = 1, answer: int = 10) -> Job:
    return Job(CHAT, tenant, session, known, known + new, answer, turns=2)


class TestSessions:
    def test_a_turn_goes_to_the_worker_of_the_turn_before(self) -> None:
        other = turn(0, 50, session="other", answer=10_000)
        turns = [turn(0, 1000, answer=10_000), turn(1000, 100)]
        day = run((0.0, [turns[0]]), (1.0, [other]), (2.0, [turns[1]]))
        assert (day.hits, day.prompts) == (1000, 1100)

    def test_a_turn_waits_for_its_full_worker_no_longer_than_it_is_held(self) -> None:
        """The first worker is full, and the other one has a place left."""
        running = [(n / 100, [turn(0, 10, session=f"{n}", answer=4000)]) for n in range(127)]
        day = run(*running, (50.0, [turn(10, 90, session="0")]))
        assert day.light_s[-1] == pytest.approx(HELD_S + 100 * PREFILL_S + STEP_S)

    def test_an_idle_worker_takes_a_turn_of_another_ones_session_at_once(self) -> None:
        """The first worker is full, and the other one has ended its answers."""
        running = [
            (n / 100, [turn(0, 10, session=f"{n}", answer=1000 if n % 2 else 4000)])
            for n in range(2 * PLACES - 1)
        ]
        day = run(*running, (80.0, [turn(10, 90, session="0")]))
        assert day.light_s[-1] == pytest.approx(100 * PREFILL_S + STEP_S)


class TestWorker:
    def test_a_cache_forgets_what_was_used_longest_ago(self) -> None:
        worker = SimulatedWorker(0)
        for prefix in ("a", "b"):
            worker.keep(prefix, CACHE // 2)
        assert worker.look_up(Job(CHAT, 0, "a", 5, 6, 1)) == 5
        worker.keep("c", CACHE // 2)
        assert [*worker.cache] == ["a", "c"]
        assert worker.cached <= CACHE

    def test_prompts_are_computed_one_after_the_other(self) -> None:
        jobs = [turn(0, 1000, session=f"{n}") for n in range(3)]
        day = run((0.0, jobs), workers=1)
        each = 1000 * PREFILL_S + STEP_S
        assert sorted(day.light_s) == pytest.approx([each, 2 * each, 3 * each])


def test_tenants_share_a_worker_by_tokens() -> None:
    heavy = [turn(0, 1000, session=f"h{n}", tenant=0, answer=1000) for n in range(400)]
    light = [turn(0, 1000, session=f"l{n}", tenant=1, answer=1000) for n in range(10)]
    day = run((0.0, heavy), (1.0, light), workers=1)
    assert max(day.light_s) < max(day.heavy_s) / 2
    assert len(day.light_s) == 10


def test_lines_of_a_template_share_its_tokens() -> None:
    lines = [Job(BULK, 1, n // 10, 2000, 2100, 10, due=3600.0) for n in range(100)]
    day = run((0.0, lines), workers=1)
    assert (day.line_hits, day.line_prompts) == (90 * 2000, 100 * 2000)
    assert day.good == day.asked == 100


def test_lines_of_a_session_are_computed_by_one_of_several_workers() -> None:
    lines = [Job(BULK, 1, n // 20, 2000, 2100, 1000, due=36_000.0) for n in range(8_000)]
    alone, together = (
        run((0.0, lines), workers=32, with_sessions=kinds).line_hits for kinds in ((), (BULK,))
    )
    assert alone < 0.3 * 8_000 * 2000
    assert together > 0.7 * 8_000 * 2000


def test_a_call_costs_what_the_server_takes() -> None:
    costs = ScriptCosts(append=1, chunk=10, opened=0, claim=100, claimed=1000, finish=0, finished=0)
    calls = Calls(claims=1, claimed=2, passed=3, appends=4, tokens=5)
    assert calls.seconds(costs) == pytest.approx(4 + 50 + 100 + 5000)


def test_sessions_and_groups_save_prompts() -> None:
    found = measure(8_000, 2, 1, ScriptCosts())
    assert list(found) == list(CASES)
    both, _, no_sessions, no_groups, _ = found.values()
    assert both["hits"] > no_sessions["hits"]
    assert both["line_hits"] > no_groups["line_hits"]
    assert both["computing"] < min(no_sessions["computing"], no_groups["computing"])
    assert both["jobs"] == pytest.approx(8_000, rel=0.15)
    assert both == measure(8_000, 2, 1, ScriptCosts())["sessions, groups"]
