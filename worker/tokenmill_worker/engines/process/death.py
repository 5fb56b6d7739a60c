"""The words for how an engine's process ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Final

# wait for a process that closed its socket to exit: killing it would lose its exit status
DYING_S: Final = 1.0


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
