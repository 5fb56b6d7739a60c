"""Describes how an engine's process ended, and finds what is left of its group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
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


def end_group(leader: int) -> None:
    """Kill the processes of a group, this one last if it is among them. Python's resource trackers
    end by themselves, when they have removed the shared memory of the others.
    """
    own = False
    for member in members_of(leader):
        with contextlib.suppress(OSError):  # it has just ended
            if int(member.name) == os.getpid():
                own = True
            elif b"multiprocessing.resource_tracker" not in (member / "cmdline").read_bytes():
                os.kill(int(member.name), signal.SIGKILL)
    if own:
        os.kill(os.getpid(), signal.SIGKILL)


def members_of(group: int) -> list[Path]:
    """Return the folders in /proc of the living processes of a process group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            # the name before the brackets' end may be cut inside a character
            state, _, its_group = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state not in (b"Z", b"X"):
                found.append(folder)
    return found
