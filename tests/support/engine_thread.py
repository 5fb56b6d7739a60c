"""An engine in a thread of the test's process, with the interface of EngineProcess."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from tokenmill_worker.contract.messages import Command, EngineFailed, Mailbox, Ready, Report, Stop
from tokenmill_worker.engines.process.death import DYING_S
from tokenmill_worker.engines.process.host import _Reports


class EngineThread(_Reports):
    """An engine in a thread of this process; `serve` runs there."""

    def __init__(
        self,
        serve: Callable[[Mailbox, Callable[[Report], None]], object],
        stall_s: float | None = None,
    ) -> None:
        super().__init__(stall_s)
        self._serve = serve
        self._mailbox = Mailbox()
        self._thread: threading.Thread | None = None

    async def start(self, on_progress: Callable[[str, float], None] | None = None) -> Ready:
        loop = asyncio.get_running_loop()

        def emit(report: Report | None) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop may be closed already
                loop.call_soon_threadsafe(self._take_in, report)

        self._thread = threading.Thread(target=self._run, args=(emit,), name="engine", daemon=True)
        self._thread.start()
        return await self._wait_ready(on_progress)

    def _run(self, emit: Callable[[Report | None], None]) -> None:
        try:
            self._serve(self._mailbox, emit)
        except Exception as error:
            emit(EngineFailed(f"{type(error).__name__}: {error}"))
        finally:
            emit(None)

    def _send(self, command: Command) -> None:
        self._mailbox.put(command)

    async def stop(self) -> None:
        self._stopping = True
        self._send(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def kill(self) -> None:
        """Send Stop and wait DYING_S.

        A thread cannot be killed: one that hangs stays behind, and its later reports are ignored.
        """
        self._stopping = True
        self._send(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, DYING_S)
