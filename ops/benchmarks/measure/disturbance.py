"""Measures what else used the cores during a round: stolen time and other processes.

The measured engine's time is that of its whole process tree.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import psutil

# share of all cores' time, stolen and others' together, above which a round counts as disturbed
DISTURBED_SHARE = 0.1
SHORTEST_S = 0.4  # of all cores together; a shorter interval gives no figures
QUIET_SHARE = 0.03
QUIET_LOOK_S, QUIET_LIMIT_S = 0.25, 5.0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its threads, ended ones included, in seconds.

    Raises OSError where the system has no such clock; Linux has it.
    """
    return time.clock_gettime(
        ~pid << 3 | 2
    )  # the process's CPU clock id, as clock_getcpuclockid(3) builds it


def wait_until_quiet(pause: Callable[[float], None] = time.sleep) -> None:
    """Wait until the cores are nearly idle, for QUIET_LIMIT_S at most.

    Work that an engine does after its turn must not count in the next engine's turn.
    """
    before = _cores()
    for _ in range(round(QUIET_LIMIT_S / QUIET_LOOK_S)):
        pause(QUIET_LOOK_S)
        after = _cores()
        if after.busy - before.busy <= QUIET_SHARE * (after.total - before.total):
            return
        before = after


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Shares of all cores' time that went to other processes and to the host."""

    others: float
    stolen: float

    @property
    def is_large(self) -> bool:
        return self.others + self.stolen > DISTURBED_SHARE

    def __str__(self) -> str:
        return f"others {self.others:.0%}, stolen {self.stolen:.0%}"


class _Cores(NamedTuple):
    """Seconds of all cores since the machine's start."""

    total: float
    busy: float
    stolen: float


def _cores() -> _Cores:
    times = psutil.cpu_times()
    stolen = getattr(times, "steal", 0.0)
    busy = times.user + times.nice + times.system
    busy += getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    return _Cores(busy + times.idle + getattr(times, "iowait", 0.0) + stolen, busy, stolen)


class CoreWatch:
    """Measures the disturbance between its construction and `read()`.

    `pid` is the root of the process tree that is being measured.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._before, self._own_before = _cores(), self._own()

    def read(self) -> Disturbance | None:
        before, after = self._before, _cores()
        total = after.total - before.total
        if total < SHORTEST_S:
            return None
        others = (after.busy - before.busy) - (self._own() - self._own_before)
        return Disturbance(max(0.0, others / total), (after.stolen - before.stolen) / total)

    def _own(self) -> float:
        """Return the CPU seconds of the tree's living processes and of reaped children."""
        seconds = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self._root, *self._root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    seconds += sum(process.cpu_times()[:4])
        return seconds
