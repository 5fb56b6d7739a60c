"""Free memory as the kernel and the container report it."""

from __future__ import annotations

from pathlib import Path

from tokenmill_worker.engine.config import machine
from tokenmill_worker.engine.cpu.device import CpuDevice


def test_free_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal:       24000000 kB\nMemAvailable:   1000 kB\n")
    assert machine.meminfo(table, "MemAvailable") == 1_024_000
    assert machine.meminfo(tmp_path / "missing", "MemAvailable") is None
    assert CpuDevice().free_memory() > 1 << 20


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert machine.cgroup_rooms(tmp_path) == []
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("1500\n")
    assert machine.cgroup_rooms(tmp_path) == [3000, 0]
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cgroup_rooms(tmp_path) == [0]
