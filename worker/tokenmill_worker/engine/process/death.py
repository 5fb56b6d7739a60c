"""The error of an engine that has died, and the words for how its process ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Final

# wait for a process that closed its socket to exit: killing it would lose its exit status
DYING_S: Final = 1.0


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


async def manner_of(process: asyncio.subprocess.Process | None) -> str:
    """Return the words that follow "the process ended"; none for a process that does not exit, and
    for a thread.
    """
    if process is None:
        return ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DYING_S):
            await process.wait()
    status = process.returncode
    if status is None:
        return ""
    if status >= 0:
        return f" with status {status}"
    name = signal_name(-status)
    is_oom = name == "SIGKILL"
    return f" by {name}" + (" (the system sends it when memory runs out)" if is_oom else "")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
