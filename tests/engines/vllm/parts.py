"""Finds the processes of a worker's vLLM."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

CORE, DEVICE_WORKER = "VLLM::EngineCore", "VLLM::Worker"


def group_of(leader: int) -> list[psutil.Process]:
    """Return the living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def part_of(engine: psutil.Process, title: str) -> psutil.Process:
    """Return the process of a group whose title begins so; vLLM gives its processes titles."""
    found = [one for one in group_of(engine.pid) if " ".join(one.cmdline()).startswith(title)]
    assert found, f"{engine.pid} has no {title}: {listed(engine.pid)}"
    return found[0]


def listed(leader: int) -> list[str]:
    """Return a line for each process of a group: its id, its parent's, its command."""
    lines = []
    for process in group_of(leader):
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline()).strip()  # a title is padded with spaces
            lines.append(f"{process.pid:>7} {process.ppid():>7} {words[-70:]}")
    return lines


def wait_for_none(leader: int, timeout_s: float = 30.0) -> float:
    """Wait until a group has no process; return the seconds."""
    began = time.monotonic()
    while left := listed(leader):
        assert time.monotonic() - began < timeout_s, "left: " + "\n".join(left)
        time.sleep(0.02)
    return time.monotonic() - began


def shared_by(leader: int) -> list[Path]:
    """Return the files of shared memory that the processes of a group have mapped."""
    found = set()
    for process in group_of(leader):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = Path(line.partition("/dev/shm/")[2])
                if path.name and not line.endswith("(deleted)"):
                    found.add(Path("/dev/shm") / path)
    return sorted(found)
