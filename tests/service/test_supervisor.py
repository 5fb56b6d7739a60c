"""The supervisor replaces a dead engine once its jobs are given back; a first load must succeed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.service.test_jobs import CAPACITY
from tests.support.waiting import until
from tokenmill.transport.backoff import Backoff
from tokenmill.transport.repairs import end_task
from tokenmill_worker import supervisor as module
from tokenmill_worker.contract.events import EngineStats, TokenEvent
from tokenmill_worker.contract.host import EngineDied
from tokenmill_worker.contract.messages import Frame, Ready
from tokenmill_worker.supervisor import EngineSupervisor

READY = Ready(
    model="tiny", max_model_len=64, max_num_seqs=8, vocab_size=9, eos_token_ids=(), model_path="",
    description="fake",
    capacity=CAPACITY,
)  # fmt: skip


class FakeHost:
    """Yields its frames, then dies; loads only if `loads`. `may_pass`: it was killed instead."""

    capacity = CAPACITY

    def __init__(
        self,
        trace: list[str],
        num_frames: int = 0,
        *,
        loads: bool = True,
        may_pass: bool = False,
    ) -> None:
        self.trace, self.num_frames, self.loads = trace, num_frames, loads
        self.may_pass = may_pass

    async def start(self, on_progress: Callable[[str, float], None]) -> Ready:
        if not self.loads:
            words = "it was killed" if self.may_pass else "no such model"
            raise EngineDied(words, at_start=True, may_pass=self.may_pass)
        on_progress("weights", 0.5)
        self.trace.append("ready")
        return READY

    async def frames(self) -> AsyncIterator[Frame]:
        event = TokenEvent(request_id="job/1", token_ids=(7,))
        for _ in range(self.num_frames):
            yield Frame(events=(event,), capacity=CAPACITY, stats=EngineStats())
        raise EngineDied("it crashed")

    async def kill(self) -> None:
        self.trace.append("killed")

    async def stop(self) -> None:
        self.trace.append("stopped")


def supervised(hosts: list[FakeHost]) -> EngineSupervisor:
    waiting = iter(hosts)
    return EngineSupervisor(lambda: next(waiting))  # type: ignore[arg-type, return-value]


async def run(supervisor: EngineSupervisor, trace: list[str]) -> None:
    async def note(name: str) -> None:
        trace.append(name)

    await supervisor.run(
        on_ready=lambda _ready: note("prepared"),
        on_frame=lambda _frame: note("frame"),
        on_death=lambda: note("given back"),
        has_requests=lambda: True,
    )


async def test_a_first_engine_that_does_not_load_is_an_error() -> None:
    trace: list[str] = []
    supervisor = supervised([FakeHost(trace, loads=False)])
    with pytest.raises(EngineDied, match="no such model") as death:
        await run(supervisor, trace)
    assert death.value.is_refusal
    assert trace == ["killed"]
    assert not supervisor.started.is_set()


async def test_a_first_engine_killed_while_loading_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RESTART_BACKOFF", Backoff(first_s=0.0))
    trace: list[str] = []
    killed = [FakeHost(trace, loads=False, may_pass=True) for _ in range(3)]
    supervisor = supervised([*killed, FakeHost(trace, 1)])
    with pytest.raises(RuntimeError):  # there is no fifth host
        await run(supervisor, trace)
    assert trace[-5:] == ["ready", "prepared", "frame", "killed", "given back"]
    assert supervisor.started.is_set()


async def test_the_restarts_of_a_first_engine_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_BACKOFF", Backoff(first_s=0.0))
    trace: list[str] = []
    hosts = [FakeHost(trace, loads=False, may_pass=True) for _ in range(9)]
    supervisor = supervised(hosts)
    with pytest.raises(EngineDied, match="it was killed; none of 5 starts succeeded") as death:
        await run(supervisor, trace)
    assert not death.value.is_refusal
    assert trace.count("killed") == 5


async def test_an_engine_that_cannot_load_ends_the_worker_after_a_killed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RESTART_BACKOFF", Backoff(first_s=0.0))
    trace: list[str] = []
    hosts = [FakeHost(trace, loads=False, may_pass=True), FakeHost(trace, loads=False)]
    with pytest.raises(EngineDied, match=r"^no such model$"):
        await run(supervised(hosts), trace)


async def test_a_dead_engine_is_replaced_after_its_jobs_were_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RESTART_BACKOFF", Backoff(first_s=0.0))
    trace: list[str] = []
    hosts = [FakeHost(trace, 1), FakeHost(trace, loads=False), FakeHost(trace, 1)]
    supervisor = supervised(hosts)
    with pytest.raises(RuntimeError):  # there is no fourth host
        await run(supervisor, trace)
    life = ["ready", "prepared", "frame", "killed", "given back"]
    assert trace == [*life, "killed", "given back", *life]
    assert (supervisor.health.engine_ready, supervisor.health.engine_restarts) == (False, 3)


async def test_a_stop_ends_the_pause_before_the_next_engine() -> None:
    trace: list[str] = []
    supervisor = supervised([FakeHost(trace, loads=True), FakeHost(trace)])
    supervisor.health.engine_restarts = 1
    supervisor._deaths = 4
    running = asyncio.create_task(run(supervisor, trace))
    try:
        await until(lambda: "given back" in trace)
        await supervisor.stop()
        await asyncio.wait_for(running, 5)
    finally:
        await end_task(running)
    assert trace[-1] == "stopped"
