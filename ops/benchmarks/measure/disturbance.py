"""Measures what else used the cores during a round, from /proc: stolen time and other processes.

The measured engine's time is that of its whole process tree. Without /proc no figures are given.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# share of all cores' time, stolen and others' together, above which a round counts as disturbed
DISTURBED_SHARE = 0.1
SHORTEST_TICKS = 40  # ticks of all cores together; a shorter interval gives no figures
QUIET_SHARE = 0.03
QUIET_LOOK_S, QUIET_LIMIT_S = 0.25, 5.0
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # fields in the first line of /proc/stat


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its threads, ended ones included, in seconds.

    Raises OSError where the system has no such clock; Linux has it.
    """
    return time.clock_gettime(
        ~pid << 3 | 2
    )  # the process's CPU clock id, as clock_getcpuclockid(3) builds it


def wait_until_quiet(
    proc: Path = Path("/proc"), pause: Callable[[float], None] = time.sleep
) -> None:
    """Wait until the cores are nearly idle, for QUIET_LIMIT_S at most.

    Work that an engine does after its turn must not count in the next engine's turn.
    """
    before = _cores(proc)
    for _ in range(round(QUIET_LIMIT_S / QUIET_LOOK_S)):
        pause(QUIET_LOOK_S)
        after = _cores(proc)
        if (
            before is None
            or after is None
            or after.busy - before.busy <= QUIET_SHARE * (after.total - before.total)
        ):
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
    """Clock ticks of all cores since the machine's start."""

    total: int
    busy: int
    stolen: int


def _cores(proc: Path) -> _Cores | None:
    try:
        first = (proc / "stat").read_text(encoding="ascii").splitlines()[0]
    except (OSError, IndexError):
        return None
    ticks = [int(word) for word in first.split()[1:9]]
    if len(ticks) <= _STEAL:
        return None
    waiting = ticks[_IDLE] + ticks[_IOWAIT] + ticks[_STEAL]
    return _Cores(sum(ticks), sum(ticks) - waiting, ticks[_STEAL])


class CoreWatch:
    """Measures the disturbance between its construction and `read()`.

    `pid` is the root of the process tree that is being measured.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._pid, self._proc = pid, proc
        self._before, self._own_before = _cores(proc), self._own()

    def read(self) -> Disturbance | None:
        before, after = self._before, _cores(self._proc)
        if before is None or after is None or after.total - before.total < SHORTEST_TICKS:
            return None
        total = after.total - before.total
        others = (after.busy - before.busy) - (self._own() - self._own_before)
        return Disturbance(max(0.0, others / total), (after.stolen - before.stolen) / total)

    def _own(self) -> int:
        """Return the CPU ticks of the tree's living processes and of reaped children."""
        # The command comes before the state, in brackets, and may contain any character.
        fields = {
            int(path.parent.name): _text(path).rpartition(")")[2].split()
            for path in self._proc.glob("[0-9]*/stat")
        }
        parents = {pid: int(found[1]) for pid, found in fields.items() if found}

        def is_ours(pid: int) -> bool:
            while pid != self._pid and pid in parents:
                pid = parents[pid]
            return pid == self._pid

        return sum(sum(map(int, fields[pid][11:15])) for pid in parents if is_ours(pid))


def _text(path: Path) -> str:
    """Return a file's text; it is empty if the process is gone."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
