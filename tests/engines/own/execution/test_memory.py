"""The cache is sized by the memory that is free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.own.truth import tiny_models
from tokenmill_worker.engines.own.attention.reference import ReferenceAttention
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.cuda.graphs import graph_sizes
from tokenmill_worker.engines.own.device import GraphSizes
from tokenmill_worker.engines.own.execution import memory
from tokenmill_worker.engines.own.model.loader import load_model


@pytest.mark.parametrize(("gib", "expected"), [(0.01, 0.01), (None, 4.0)])
def test_on_a_cpu_the_pool_is_capped(tmp_path: Path, gib: float | None, expected: float) -> None:
    folder = tiny_models.save("gemma3", tmp_path)
    config = EngineConfig(
        model=str(folder), device="cpu", fuse=False, max_memory_gib=gib, cpu_offload_gib=0.002,
        block_size=16,
    ).with_step_sizes(on_gpu=False)  # fmt: skip
    loaded = load_model(folder, config, CpuDevice())
    backend = ReferenceAttention()
    cache, length = memory.size_cache(loaded, config, backend, torch.float32, may_shorten=True)
    shape = memory.memory_shape(loaded, config, backend, torch.float32, length)
    used = shape.block_bytes * cache.num_blocks
    on_host = shape.block_bytes * cache.num_host_blocks
    assert length == 256
    assert 0.99 * expected < used / memory.GIB <= expected
    assert 0.9 * 0.002 < on_host / memory.GIB <= 0.002


@pytest.mark.parametrize(("free_gib", "expected"), [(16.0, 0.25), (0.35, 0.08)])
def test_an_automatic_host_pool_is_as_large_as_the_cache_and_leaves_a_fifth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, expected: float
) -> None:
    """The cache takes its share of a CPU's free memory first: 0.8 · (0.35 - 0.25) is left."""
    folder = tiny_models.save("gemma3", tmp_path)
    config = EngineConfig(
        model=str(folder), device="cpu", fuse=False, max_memory_gib=0.25, cpu_offload_gib="auto",
        block_size=16,
    ).with_step_sizes(on_gpu=False)  # fmt: skip
    loaded = load_model(folder, config, CpuDevice())
    backend = ReferenceAttention()
    monkeypatch.setattr(memory, "available_memory", lambda: int(free_gib * memory.GIB))
    cache, length = memory.size_cache(loaded, config, backend, torch.float32, may_shorten=True)
    shape = memory.memory_shape(loaded, config, backend, torch.float32, length)
    on_host = shape.block_bytes * cache.num_host_blocks
    assert 0.97 * expected < on_host / memory.GIB <= expected


def test_a_set_number_of_blocks_is_used_unchanged(tmp_path: Path) -> None:
    folder = tiny_models.save("gemma3", tmp_path)
    config = EngineConfig(model=str(folder), device="cpu", fuse=False, num_blocks=17, block_size=16)
    config = config.with_step_sizes(on_gpu=False)
    cache, _ = memory.size_cache(
        load_model(folder, config, CpuDevice()),
        config,
        ReferenceAttention(),
        torch.float32,
        may_shorten=True,
    )
    assert (cache.num_usable, cache.num_host_blocks) == (17, 0)
    assert cache.num_blocks == 18, "the reserved block is not one of them"


class WithGraphs(CpuDevice):
    def graph_sizes(self, config: EngineConfig, max_model_len: int) -> GraphSizes:
        return graph_sizes(config, max_model_len)


def test_memory_for_captured_graphs_is_reserved(tmp_path: Path) -> None:
    """They share logits and activations, those of the largest one."""
    folder = tiny_models.save("llama", tmp_path)
    config = EngineConfig(
        model=str(folder), device="cpu", fuse=False, max_num_seqs=20, cuda_graphs=True,
        block_size=16,
    ).with_step_sizes(on_gpu=False)  # fmt: skip
    loaded = load_model(folder, config, WithGraphs())
    shapes = [
        memory.memory_shape(
            loaded, config.replace(**change), ReferenceAttention(), torch.float32, 256
        )
        for change in ({}, {"cuda_graphs": False})
    ]
    assert [shape.graph_rows for shape in shapes] == [512, 0]
    kept = shapes[0].graph_rows * loaded.vocab_size * 4
    assert (
        shapes[0].fixed - shapes[1].fixed
        == kept + shapes[0].activations * 1024 // config.max_num_batched_tokens
    )


def test_the_widest_layer_counts_for_the_memory_of_activations(llama: Path) -> None:
    """Gemma 3n's configuration lists them."""
    config = EngineConfig(
        model=str(llama), device="cpu", fuse=False, block_size=16
    ).with_step_sizes(on_gpu=False)  # fmt: skip
    loaded = load_model(llama, config, CpuDevice())

    def activations() -> int:
        return memory.memory_shape(
            loaded, config, ReferenceAttention(), torch.float32, 256
        ).activations

    expected, width = activations(), loaded.config.intermediate_size
    object.__setattr__(loaded.config, "intermediate_size", [width // 2, width])
    assert activations() == expected


def test_a_step_that_no_setting_limits_leaves_room_for_the_cache(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = EngineConfig(model=str(llama), device="cpu", fuse=False, block_size=16)
    loaded = load_model(llama, given, CpuDevice())

    def needs(tokens: int, seqs: int) -> int:
        config = given.replace(max_num_batched_tokens=tokens, max_num_seqs=seqs)
        return memory.memory_shape(
            loaded, config, ReferenceAttention(), torch.float32, loaded.max_model_len
        ).fixed

    def limits(free: float, on_gpu: bool = True, **changes: object) -> tuple[int, int]:
        loaded.device.free_memory = lambda: int(free)  # type: ignore[method-assign]
        asked = given.replace(**changes)
        found = memory.with_step_that_fits(
            asked, asked.with_step_sizes(on_gpu=on_gpu), loaded, ReferenceAttention(), torch.float32
        )
        return found.max_num_batched_tokens, found.max_num_seqs

    with caplog.at_level("INFO", "tokenmill_worker.engines.own"):
        assert limits(needs(2048, 256) / 0.9 / 0.24) == (2048, 256)
        assert not caplog.records
        assert limits(needs(1024, 128) / 0.9 / 0.24) == (1024, 128)
        assert len(caplog.records) == 1
    assert limits(1) == (256, 16)
    assert limits(1, max_num_seqs=300) == (300, 300)
    assert limits(1, max_num_batched_tokens=2000) == (2000, 16)
    assert limits(1, max_num_seqs=8) == (256, 8)
    assert limits(1, on_gpu=False, max_num_batched_tokens=100) == (100, 16)
