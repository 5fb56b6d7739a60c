"""The arithmetic of the pools against real allocations."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.attention.reference import ReferenceAttention
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.config.cache import (
    CacheConfig,
    LayerGroup,
    Window,
    numbers_in_block,
    with_common_blocks,
)
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.execution.memory import memory_shape
from tokenmill_worker.engines.own.kv.manager import KVManager
from tokenmill_worker.engines.own.kv.sizing import DoesNotFitError, MemoryShape, solve
from tokenmill_worker.engines.own.kv.tensors import KVCachePool
from tokenmill_worker.engines.own.model.loader import load_model
from tokenmill_worker.engines.own.model.paged_attention import Probe
from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sampling import ScoredRows
from tokenmill_worker.engines.own.sequence import Sequence

FULL = LayerGroup((0, 1, 2), 2, 16)
SLIDING = LayerGroup((3, 4, 5, 6, 7), 2, 16, window=Window(100))
BIG = LayerGroup((8,), 8, 32)


def make_shape(*groups: LayerGroup, **changes: Any) -> MemoryShape:
    settings: dict[str, Any] = {
        "groups": with_common_blocks(groups), "block_size": 16, "kv_bytes": 4,
        "activation_bytes": 4, "hidden_size": 64, "intermediate_size": 128, "query_size": 64,
        "vocab_size": 1000, "max_num_tokens": 64, "max_num_rows": 8, "max_num_seqs": 8,
        "max_model_len": 1024,
    }  # fmt: skip
    return MemoryShape(**{**settings, **changes})


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING), (SLIDING, BIG), (FULL, SLIDING, BIG)])
@pytest.mark.parametrize("budget", [6 << 20, 9_999_999, 50 << 20, 200 << 20])
def test_the_pool_fills_the_budget_to_the_last_block(
    groups: tuple[LayerGroup, ...], budget: int
) -> None:
    shape = make_shape(*groups)
    pool = KVCachePool.allocate(
        shape.groups, solve(shape, budget), 16, ReferenceAttention(), torch.float32, CpuDevice()
    )
    left = budget - shape.fixed - pool.num_bytes
    assert 0 <= left < shape.block_bytes


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING)])
def test_the_least_pool_holds_a_sequence_of_the_models_length(
    groups: tuple[LayerGroup, ...],
) -> None:
    shape = make_shape(*groups)
    least = shape.fixed + shape.pool_bytes_for(shape.max_model_len)
    cache = CacheConfig(16, shape.groups, solve(shape, least))
    kv = KVManager(cache, model_key="m", max_chunk=shape.max_num_tokens, safety_margin=0.0)
    assert kv.max_tokens_alone(shape.max_model_len) == shape.max_model_len
    with pytest.raises(DoesNotFitError):
        solve(shape, least - 1)


def test_a_sliding_group_is_sized_by_what_a_step_attends_to() -> None:
    shape = make_shape(FULL, SLIDING, max_model_len=16_384)
    full, sliding = shape.groups
    size = 16 * full.kernel_blocks
    in_reach = -(-(100 - 1 + 64) // (16 * sliding.kernel_blocks)) + 1
    assert shape.blocks_for(16_384) == -(-16_384 // size) + in_reach


@pytest.mark.parametrize(
    ("layers", "counts"),
    [
        ((12, 12), (1, 1)),  # gpt-oss-20b
        ((5, 1), (1, 5)),
        ((22, 4), (1, 6)),  # Gemma 3 1B
        ((29, 5), (1, 6)),  # Gemma 3 4B
        ((52, 10), (1, 5)),  # Gemma 3 27B
        ((3, 2), (2, 3)),
        ((1, 1, 7), (7, 7, 1)),
    ],
)
def test_blocks_of_all_groups_have_nearly_the_same_bytes(
    layers: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    groups = with_common_blocks([LayerGroup(tuple(range(count)), 4, 64) for count in layers])
    assert tuple(group.kernel_blocks for group in groups) == counts
    block = numbers_in_block(groups, 16)
    for group in groups:
        assert block % group.kernel_blocks == 0
        assert 7 / 8 * block <= 16 * group.kernel_blocks * group.token_size <= block


def test_too_little_memory_is_an_error_with_the_length_that_fits() -> None:
    shape = make_shape(FULL)
    one_block = shape.block_bytes
    with pytest.raises(DoesNotFitError) as caught:
        solve(shape, shape.fixed + 11 * one_block)
    assert caught.value.longest == 160  # ten blocks beside the reserved one
    with pytest.raises(DoesNotFitError) as caught:
        solve(shape, shape.fixed // 2)
    assert caught.value.longest == 0


@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "length", "num_bytes"),
    [
        (1, 32, 1, 16 << 10),  # a layer of Llama-2-7B: 8,192 numbers
        (32, 8, 1, 131_072),  # Llama-3 8B
        (32, 8, 512, 64 << 20),
        (32, 8, 4096, 512 << 20),
    ],
)
def test_a_cached_token_takes_the_bytes_named_in_the_documents(
    num_layers: int, num_kv_heads: int, length: int, num_bytes: int
) -> None:
    group = LayerGroup(tuple(range(num_layers)), num_kv_heads, 128)
    shape = make_shape(group, block_size=1, kv_bytes=2)
    assert shape.blocks_for(length) * shape.block_bytes == num_bytes


def test_steps_ahead_take_a_second_set_of_inputs_and_logits_and_no_more(llama: Path) -> None:
    one, two = make_shape(FULL, num_buffer_sets=1), make_shape(FULL, num_buffer_sets=2)
    assert two.fixed - one.fixed == one.logits + one.bookkeeping
    config = EngineConfig(model=str(llama), device="cpu", async_batching=True)
    config = config.with_step_sizes(on_gpu=False).replace(block_size=16)
    loaded = load_model(llama, config, CpuDevice())
    shape = memory_shape(loaded, config, ReferenceAttention(), torch.float32, 256)
    assert shape.num_buffer_sets == 2


def test_states_of_all_sequences_and_graphs_are_kept_beside_the_blocks() -> None:
    plain = make_shape(FULL).fixed
    assert make_shape(FULL, state_bytes=1000).fixed == plain + 8 * 1000
    assert make_shape(FULL, graph_rows=3).fixed == plain + 3 * 1000 * 4


def test_a_cap_bounds_the_pools_alone() -> None:
    shape = make_shape(FULL)
    assert solve(shape, 1 << 30, 4 << 20) == (4 << 20) // shape.block_bytes


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of live storages that operators create, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage()._cdata not in inputs | self._known
            ):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "phi3", "deepseek_v3"])
def test_a_real_step_stays_within_the_estimate(name: str, folder_of: Callable[[str], Path]) -> None:
    """The estimate of activations and logits bounds what a step allocates, by a small factor."""
    folder = folder_of(name)
    config = EngineConfig(
        model=str(folder), device="cpu", fuse=False, max_num_batched_tokens=128, max_num_seqs=16
    )
    loaded = load_model(folder, config, CpuDevice())
    shape = memory_shape(loaded, config, ReferenceAttention(), torch.float32, loaded.max_model_len)
    tokens = torch.arange(128)
    gc.collect()
    with PeakMemory() as memory, torch.inference_mode():
        logits = loaded.logits(tokens, tokens, tokens[:16], Probe())
    assert logits.shape[0] == 16
    estimate = shape.activations + shape.logits
    assert memory.peak <= estimate
    assert memory.peak > estimate / 8


def test_a_step_of_scored_tokens_stays_within_the_estimate(llama: Path) -> None:
    config = EngineConfig(
        model=str(llama), device="cpu", fuse=False, max_num_batched_tokens=128, max_num_seqs=1
    )
    loaded = load_model(llama, config, CpuDevice())
    shape = memory_shape(loaded, config, ReferenceAttention(), torch.float32, loaded.max_model_len)
    params = SamplingParams(prompt_logprobs=5)
    sequence = Sequence("r", [5] * 129, 129, params, scored_end=129)
    rows = ScoredRows.of(
        [ScheduledSequence(sequence, 0, 128, False, scored_from=1, num_scored=128)]
    )
    assert rows is not None
    tokens = torch.arange(128)
    gc.collect()
    with PeakMemory() as memory, torch.inference_mode():
        rows.take(loaded.logits(tokens, tokens, tokens, Probe()), loaded.vocab_size)
    assert memory.peak <= shape.activations + shape.logits
