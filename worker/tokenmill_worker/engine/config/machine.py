"""Reads the machine's memory from Linux and the container's control group; plain Python."""

from __future__ import annotations

from pathlib import Path

_UNKNOWN_MEMORY = 4 << 30
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


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
