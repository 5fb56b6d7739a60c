"""Free memory and usable cores as the kernel and the container report them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tokenmill_worker.engines.own.config import EngineConfig, machine
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.execution import build


def test_free_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal:       24000000 kB\nMemAvailable:   1000 kB\n")
    assert machine.meminfo(table, "MemAvailable") == 1_024_000
    assert machine.meminfo(tmp_path / "missing", "MemAvailable") is None
    assert CpuDevice().free_memory() > 1 << 20


def test_free_memory_is_bounded_by_the_container_s_limit(tmp_path: Path) -> None:
    assert machine.cgroup_rooms(tmp_path) == []
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("1500\n")
    assert machine.cgroup_rooms(tmp_path) == [3000, 0]
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cgroup_rooms(tmp_path) == [0]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_usable_cores_follow_the_container_s_quota_in_cgroup_1_and_2(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    assert machine.cpu_quotas(root, own) == []
    write(root / "cpu.max", "max 100000\n")
    write(root / "cpu/cpu.cfs_quota_us", "-1\n")
    write(root / "cpu/cpu.cfs_period_us", "100000\n")
    assert machine.cpu_quotas(root, own) == []
    write(root / "cpu.max", "250000 100000\n")
    write(root / "cpu/cpu.cfs_quota_us", "75000\n")
    assert machine.cpu_quotas(root, own) == [2.5, 0.75]


def test_usable_cores_follow_the_least_quota_of_the_process_s_own_and_outer_cgroups(
    tmp_path: Path,
) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    write(own, "12:memory:/other\n4:cpu,cpuacct:/a/b\n0::/system.slice/worker.service\n")
    write(root / "system.slice/worker.service/cpu.max", "300000 100000\n")
    write(root / "system.slice/cpu.max", "800000 100000\n")
    write(root / "cpu/a/cpu.cfs_quota_us", "400000\n")
    write(root / "cpu/a/cpu.cfs_period_us", "100000\n")
    write(root / "other/cpu.max", "100 100000\n")
    assert sorted(machine.cpu_quotas(root, own)) == [3.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("quota", "cores"), [("max", 4), ("400000", 4), ("250000", 2), ("50000", 1), ("900000", 4)]
)
def test_threads_follow_the_lower_of_affinity_mask_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    write(tmp_path / "cpu.max", f"{quota} 100000\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5, 7})
    assert machine.usable_cores() == cores
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(16)
        build._set_threads(EngineConfig(model="none"))
        assert torch.get_num_threads() == cores
        build._set_threads(EngineConfig(model="none", num_threads=3))
        assert torch.get_num_threads() == 3  # what is set counts
        torch.set_num_threads(1)
        build._set_threads(EngineConfig(model="none"))
        assert torch.get_num_threads() == 1  # as OMP_NUM_THREADS or the caller wants it
    finally:
        torch.set_num_threads(before)
