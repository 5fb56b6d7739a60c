"""Reads memory and cores from Linux and the container's control groups; plain Python."""

from __future__ import annotations

import os
from pathlib import Path

_UNKNOWN_MEMORY = 4 << 30
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return how many threads this process may keep busy: the cores of its affinity mask, and no
    more than a CPU quota grants. A quota's fraction is left to threads that do not compute.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, int(min([cores, *cpu_quotas(_CGROUP, _OWN_GROUPS)])))


def cpu_quotas(root: Path, own_groups: Path) -> list[float]:
    """Return, in cores, each CPU quota of the process's control groups and of the groups around
    them, for control groups v1 and v2.
    """
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        lines = []
    folders = [root, root / "cpu"]  # which a container sees as those of its own group
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            group = root / ("cpu" if controllers else "") / path.strip("/")
            folders += [group, *group.parents]
    return [quota for folder in dict.fromkeys(folders) if (quota := _quota(folder)) is not None]


def _quota(group: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = " ".join((group / name).read_text() for name in names).split()
            quota, period = map(int, words)
        except (OSError, ValueError):  # missing, or "max"
            continue
        if quota > 0:  # -1: no limit
            return quota / period
    return None


def available_memory() -> int:
    """Return the bytes that can be allocated now."""
    return min([meminfo(_MEMINFO, "MemAvailable") or _UNKNOWN_MEMORY, *cgroup_rooms(_CGROUP)])


def total_memory() -> int | None:
    """Return the bytes that the machine has or the container may use; None if unknown."""
    found = [meminfo(_MEMINFO, "MemTotal"), *(limit for limit, _usage in _cgroup_files(_CGROUP))]
    return min((size for size in found if size is not None), default=None)


def meminfo(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None
    )


def cgroup_rooms(root: Path) -> list[int]:
    """Return the bytes that memory limits of the container leave, for control groups v1 and v2."""
    return [max(0, limit - usage) for limit, usage in _cgroup_files(root)]


def _cgroup_files(root: Path) -> list[tuple[int, int]]:
    """Return (limit, usage) in bytes of each control group file pair that exists."""
    found = []
    for limit, usage in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        try:
            found.append((int(limit.read_text()), int(usage.read_text())))
        except (OSError, ValueError):  # missing, or "max"
            continue
    return found
