"""Tests of the figures that a frame carries beside a step's events."""

from __future__ import annotations

from typing import Any

from tokenmill_worker.contract.events import Capacity, EngineStats
from tokenmill_worker.contract.messages import Command, Frame, Mailbox, Report
from tokenmill_worker.engines.frames import IDLE_REPORT_S, STATS_EVERY_S
from tokenmill_worker.engines.own.serve.loop import EngineLoop

CAPACITY = Capacity(
    free_sequences=1, free_blocks=1, waiting=0, running=1, block_size=16, max_model_len=64
)


class FakeEngine:
    """Simulates an engine whose steps take the given seconds."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = list(seconds)
        self.now = 0.0
        self.done = 0

    @property
    def has_work(self) -> bool:
        return bool(self._seconds)

    @property
    def waits_only(self) -> bool:
        return False

    def step(self) -> list[Any]:
        self.now += self._seconds.pop(0)
        self.done += 1
        return []

    def capacity(self) -> Capacity:
        return CAPACITY

    def stats(self) -> EngineStats:
        return EngineStats(steps=self.done)


def reported_steps(seconds: list[float]) -> list[int | None]:
    """Return for each frame the number of steps its figures count, or None if it has no figures."""
    engine, reports = FakeEngine(seconds), list[Report]()
    loop = EngineLoop(engine, Mailbox(), reports.append, clock=lambda: engine.now)  # type: ignore[arg-type]
    while engine.has_work:
        assert loop._run_once()
    return [
        frame.stats.steps if frame.stats is not None else None
        for frame in reports
        if isinstance(frame, Frame)
    ]


def test_short_steps_share_statistics_and_the_last_step_has_them() -> None:
    short = STATS_EVERY_S / 4
    assert reported_steps([short] * 7) == [1, None, None, None, 5, None, 7]


def test_each_long_step_has_its_own_statistics() -> None:
    assert reported_steps([STATS_EVERY_S * 2] * 3) == [1, 2, 3]


class Prepares(FakeEngine):
    """Simulates an engine that only waits for a grammar."""

    waits_only = True


def test_an_engine_that_waits_for_a_grammar_sends_only_heartbeats() -> None:
    looks = 1000
    reports: list[Report] = []
    engine = Prepares([IDLE_REPORT_S / 100] * looks)
    loop = EngineLoop(engine, NobodyWrites(), reports.append, clock=lambda: engine.now)  # type: ignore[arg-type]
    while engine.has_work:
        assert loop._run_once()
    assert engine.done == looks
    assert len(reports) == looks // 100


class NobodyWrites(Mailbox):
    """A mailbox that stays empty. Its readers must wait with a timeout above 0."""

    def take_all(self, timeout: float = 0.0) -> list[Command]:
        assert timeout > 0
        return []
