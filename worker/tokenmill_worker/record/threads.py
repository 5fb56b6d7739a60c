"""Runs blocking calls in threads, with a time limit.

SQL drivers block. A call that takes too long is abandoned with its thread, so a frozen server costs
a thread and not the worker. If an abandoned call commits late, that is harmless: inserts ignore
rows that exist.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from tokenmill_worker.errors import StoreUnavailable

T = TypeVar("T")


class BlockingCalls:
    """A pool of threads. A thread that has finished its call waits for the next one, since
    creating a thread costs a third of a transaction. A thread whose call took too long is
    abandoned, and ends when the call returns.
    """

    def __init__(self) -> None:
        self._idle: list[_Thread] = []  # used only by the event loop

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """Run the call in a thread. Raises StoreUnavailable when it takes longer than
        `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        thread = self._idle.pop() if self._idle else _Thread()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():  # the caller has given up
                thread.end()
                return
            self._idle.append(thread)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                result = call()
            except BaseException as caught:  # raised in the awaiting task
                error = caught
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:  # the loop ended during the call
                thread.end()

        thread.calls.put(run)
        try:
            # not wait_for: Python 3.11's can swallow a cancellation
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise StoreUnavailable(
                f"the SQL store did not answer within {timeout_s:g} s"
            ) from error

    def close(self) -> None:
        """End the idle threads. Threads with an abandoned call end when it returns."""
        while self._idle:
            self._idle.pop().end()


class _Thread:
    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="sql", daemon=True).start()

    def end(self) -> None:
        self.calls.put(None)

    def _serve(self) -> None:
        while (call := self.calls.get()) is not None:
            call()
