"""Rows of the last layer that are not read are left out, and the others do not change by a bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.own.cpu.fused.test_layers import load
from tokenmill_worker.engines.own.attention import AttentionMetadata, AttentionShape
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.cpu.attention import CpuAttention
from tokenmill_worker.engines.own.cpu.fused.layer_calls import Scratch
from tokenmill_worker.engines.own.cpu.fused.layer_run import LayerRun
from tokenmill_worker.engines.own.cpu.fused.prepare_weights import prepare_weights
from tokenmill_worker.engines.own.model.paged_attention import LayerBinding, PagedStep

pytestmark = pytest.mark.usefixtures("linear_kernels")

LAYERS = 4
QUERY_LENS = (9, 1, 6, 4)
SEQ_LENS = (9, 14, 11, 4)  # the second and the third have a past
NUM_BLOCKS = 20
Layers = tuple[LayerRun, CpuAttention]
BLOCK = 4


@pytest.fixture(params=["qwen3", "gemma2"])  # norms of heads; norms behind attention and MLP
def layers(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Layers:
    model = prepare_weights(
        load(folder_of(request.param)), EngineConfig(model=request.param, device="cpu")
    )
    members: Any = model.get_submodule("model.layers")
    return LayerRun([layer.parts for layer in members], Scratch()), CpuAttention()


@torch.inference_mode()
def run(layers: Layers, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output rows and the cache of one step."""
    generator = torch.Generator().manual_seed(7)
    run_layers, backend = layers
    cache = torch.randn(
        NUM_BLOCKS, LAYERS, 2, *backend.block_shape(BLOCK, 2, 16), generator=generator
    )
    starts = torch.tensor([0, *QUERY_LENS]).cumsum(0)
    tables = torch.arange(1, 17, dtype=torch.int32).reshape(4, 4)
    slots = [
        int(tables[index, position // BLOCK]) * BLOCK + position % BLOCK
        for index, (count, length) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True))
        for position in range(length - count, length)
    ]
    metadata = AttentionMetadata(
        query_start=starts.to(torch.int32), seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
        block_table=tables,
        slot_mapping=torch.tensor(slots), max_query_len=max(QUERY_LENS), max_seq_len=max(SEQ_LENS),
        block_size=BLOCK,
        window=None, query_lens_host=QUERY_LENS, seq_lens_host=SEQ_LENS,
    )  # fmt: skip
    shape = AttentionShape(4, 2, 16, 0.25)
    bindings = {index: LayerBinding(0, cache[:, index], shape) for index in range(LAYERS)}
    step = PagedStep(backend, bindings, (metadata,), rows)
    hidden = torch.randn(1, len(slots), 64, generator=generator)
    angles = torch.randn(1, len(slots), 16, generator=generator)
    out = run_layers(hidden, {"paged": step, "position_embeddings": (angles.cos(), angles.sin())})
    assert out is not None
    return out[0], cache


@pytest.mark.parametrize(
    "rows", [[8, 9, 15, 19], [0], [3, 8, 15], [17, 18, 19], [9], list(range(0, 20, 2))]
)
def test_rows_of_the_last_layer_that_are_read_have_the_same_bits(
    rows: list[int], layers: Layers
) -> None:
    all_rows, whole_cache = run(layers, None)
    some_rows, cache = run(layers, torch.tensor(rows))
    assert torch.equal(some_rows[rows], all_rows[rows])
    assert torch.equal(cache, whole_cache)


def test_rows_of_the_last_layer_that_are_not_read_are_not_computed(layers: Layers) -> None:
    all_rows, _ = run(layers, None)
    some_rows, _ = run(layers, torch.tensor([19]))
    assert [row for row in range(20) if torch.equal(some_rows[row], all_rows[row])] == [19]


def test_a_step_without_read_rows_still_fills_the_cache(layers: Layers) -> None:
    _, whole_cache = run(layers, None)
    _, cache = run(layers, torch.tensor([], dtype=torch.int64))
    assert torch.equal(cache, whole_cache)


def test_all_rows_are_computed_if_most_are_read(layers: Layers) -> None:
    all_rows, _ = run(layers, None)
    some_rows, _ = run(layers, torch.arange(11))
    assert torch.equal(some_rows, all_rows)


def test_steps_with_and_without_left_out_rows_may_alternate(layers: Layers) -> None:
    """The arguments of one kind of step do not leak into the next."""
    first, _ = run(layers, None)
    for rows in ([8], None, [8, 9], [], None):
        out, _ = run(layers, None if rows is None else torch.tensor(rows, dtype=torch.int64))
        kept = list(range(20)) if rows is None else rows
        assert torch.equal(out[kept], first[kept])
