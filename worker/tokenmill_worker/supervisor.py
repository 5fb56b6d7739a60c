"""Keeps an engine running: starts it, passes on its frames, and replaces it if it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tokenmill.transport.backoff import Backoff
from tokenmill.transport.repairs import wait_at_most
from tokenmill_worker.contract.events import EngineStats
from tokenmill_worker.contract.host import EngineDied, EngineHost
from tokenmill_worker.contract.messages import Frame, Ready

log = logging.getLogger(__name__)

# after the second death in a row and those that follow; the first engine is replaced at once
RESTART_BACKOFF = Backoff(first_s=1.0, longest_s=30.0, factor=3.0, spread=(1.0, 1.0))
START_TRIES = 5  # of the first engine, where it was killed or lacked memory


@dataclass(slots=True)
class Health:
    """The state that /healthz and the metrics read."""

    engine_ready: bool = False
    engine_restarts: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


class EngineSupervisor:
    """Runs one engine after the other until `stopping` is set."""

    def __init__(self, host_factory: Callable[[], EngineHost]) -> None:
        self.health = Health()
        self.host: EngineHost | None = None
        self.started = asyncio.Event()  # an engine has been ready once: jobs may be claimed
        self.stopping = asyncio.Event()
        self._host_factory = host_factory
        self._deaths = 0  # consecutive deaths of engines

    async def run(
        self,
        *,
        on_ready: Callable[[Ready], Awaitable[None]],
        on_frame: Callable[[Frame], Awaitable[None]],
        on_death: Callable[[], Awaitable[None]],
        has_requests: Callable[[], bool],
    ) -> None:
        """Keep an engine running until stop(). Raises EngineDied if the first one does not load: at
        once where it says why, after START_TRIES where it was killed or lacked memory.

        Args:
            on_ready: awaited when an engine has loaded.
            on_frame: awaited for each of its frames.
            on_death: awaited after one died and before the next starts.
            has_requests: returns whether requests are in the engine.
        """
        while not self.stopping.is_set():
            try:
                await self._start(on_ready)
                await self._pass_frames(on_frame)
            except EngineDied as death:
                self.health.engine_ready = False
                if has_requests() and not death.any_step:
                    self._deaths = min(self._deaths, 1)  # the suspects soon run in smaller groups
                self.health.stats = EngineStats()
                if self.host is not None:
                    await self.host.kill()
                if self.stopping.is_set():  # it was stopped while it started
                    return
                if not self.started.is_set():
                    self._judge_start(death)
                log.error("Engine died; a new one starts: %s", death)
                await on_death()
                pause_s = RESTART_BACKOFF.delay_s(self._deaths) if self._deaths else 0.0
                await wait_at_most(self.stopping, pause_s)
                self._deaths += 1
                self.health.engine_restarts += 1

    async def stop(self) -> None:
        """Stop the engine; `run` returns."""
        self.stopping.set()
        if self.host is not None:
            await self.host.stop()

    def _judge_start(self, death: EngineDied) -> None:
        """Raise the death of a first engine that another start would share."""
        tries = self.health.engine_restarts + 1
        if not death.may_pass:
            raise death
        if tries >= START_TRIES:
            words = f"{death}; none of {tries} starts succeeded"
            raise EngineDied(words, at_start=True, may_pass=True)

    async def _start(self, on_ready: Callable[[Ready], Awaitable[None]]) -> None:
        self.host = self._host_factory()
        ready = await self.host.start(_log_progress)
        await on_ready(ready)
        log.info("Engine ready: %s", ready.description)
        self.health.engine_ready = True
        self.started.set()

    async def _pass_frames(self, on_frame: Callable[[Frame], Awaitable[None]]) -> None:
        assert self.host is not None
        async for frame in self.host.frames():
            self.health.stats = frame.stats or self.health.stats
            if self._deaths > 1 and any(event.token_ids for event in frame.events):
                self._deaths = 1
            await on_frame(frame)


def _log_progress(what: str, fraction: float) -> None:
    """Log loading progress. A stage without a percentage logs only its start and its end."""
    progress = "" if fraction <= 0 else ": done" if fraction >= 1 else f" ({100 * fraction:.0f} %)"
    log.info("Engine: %s%s", what, progress)
