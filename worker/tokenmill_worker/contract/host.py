"""The worker's side of an engine: start it, send it requests, read its frames, end it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import Capacity
from tokenmill_worker.contract.messages import Frame, Ready
from tokenmill_worker.contract.requests import GenerationRequest


class EngineDied(RuntimeError):
    """The engine has died, or hangs.

    `at_start`: it never became ready. `may_pass`: it was killed or lacked memory, so another start
    may succeed. `any_step`: its steps failed whatever they held.
    """

    def __init__(
        self,
        message: str,
        *,
        at_start: bool = False,
        may_pass: bool = False,
        any_step: bool = False,
    ) -> None:
        super().__init__(message)
        self.at_start = at_start
        self.may_pass = may_pass
        self.any_step = any_step

    @property
    def is_refusal(self) -> bool:
        """Return whether the engine has refused its settings, or lacks what they name."""
        return self.at_start and not self.may_pass


class EngineHost(Protocol):
    """An engine that runs in another process or thread."""

    async def start(self, on_progress: Callable[[str, float], None] | None = None) -> Ready:
        """Start the engine and wait until it is ready. Raises EngineDied when it cannot load."""
        ...

    def submit(self, requests: Iterable[GenerationRequest]) -> None: ...

    def cancel(self, request_id: str, reason: FinishReason, choice: int | None = None) -> None: ...

    def frames(self) -> AsyncIterator[Frame]:
        """Yield the frames of all steps, until stop().

        Raises EngineDied when the engine dies or hangs; call kill() then.
        """
        ...

    @property
    def capacity(self) -> Capacity:
        """The capacity reported by the last frame."""
        ...

    async def stop(self) -> None: ...

    async def kill(self) -> None: ...
