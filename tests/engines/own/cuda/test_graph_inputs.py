"""Padded shapes and the static inputs of graphs, on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.engines.own.cuda.steps import config, step
from tokenmill_worker.engines.own.attention import CommonPrefix
from tokenmill_worker.engines.own.cuda.graph_inputs import (
    StaticInputs,
    padded_batch,
    padded_length,
    padded_lengths,
    padded_shape,
)

# ── shapes ──


def test_small_batches_are_padded_by_few_rows() -> None:
    sizes = [padded_batch(n) for n in range(1, 1025)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert all(0 <= size - n < min(n, 32) for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 40


def test_a_decode_and_a_mixed_step_have_different_padded_shapes() -> None:
    decode = padded_shape(step([(1, 30)] * 5), config(), 512)
    assert (decode.is_decode, decode.num_tokens, decode.num_seqs, decode.num_rows) == (
        True,
        8,
        8,
        8,
    )
    assert (decode.max_query_len, decode.max_seq_len) == (1, 64)
    mixed = padded_shape(step([(1, 65), (20, 20), (1, 2)], num_rows=2), config(), 512)
    assert (mixed.is_decode, mixed.num_tokens, mixed.num_seqs, mixed.num_rows) == (False, 32, 4, 2)
    assert (mixed.max_query_len, mixed.max_seq_len) == (32, 128)


def test_lengths_are_not_padded_beyond_the_models() -> None:
    assert padded_shape(step([(1, 70)]), config(), 100).max_seq_len == 100
    assert padded_shape(step([(1, 70)]), config(kv_padding_interval=16_384), 100).max_seq_len == 100


def test_lengths_are_powers_of_two_times_the_interval() -> None:
    assert padded_lengths(config(), 1000) == (64, 128, 256, 512, 1000)
    for length in (1, 64, 65, 512, 513, 999, 1000):
        padded = padded_length(length, config(), 1000)
        assert padded == min(found for found in padded_lengths(config(), 1000) if found >= length)


# ── static inputs ──


@pytest.mark.parametrize(
    "lens", [[(1, 30)] * 3, [(1, 30), (20, 64), (3, 3)]], ids=["decode", "mixed"]
)
def test_inputs_of_a_larger_step_before_are_overwritten_by_padding(
    lens: list[tuple[int, int]],
) -> None:
    """A step loaded after a larger one leaves the same buffers as if it were the first."""
    larger = [(1, 60)] * 4 if lens[0] == lens[-1] else [(1, 60), (26, 64), (3, 3), (1, 2)]
    shape = padded_shape(step(lens), config(), 512)
    assert padded_shape(step(larger), config(), 512) == shape
    used, fresh = (StaticInputs(step(lens), config(), 512) for _ in range(2))
    for other in (larger, [(1, 60)] * 7, [(100, 200), (3, 4)]):  # shapes share the tensors
        before = step(other, first_token=50)
        used.load(padded_shape(before, config(), 512), before)
    used.load(shape, step(lens))
    fresh.load(shape, step(lens))
    ours, theirs = used.current(shape), fresh.current(shape)
    assert torch.equal(ours.input_ids, theirs.input_ids)
    assert torch.equal(ours.positions, theirs.positions)
    for name in ("query_start", "seq_lens", "slot_mapping", "block_table"):
        assert torch.equal(getattr(ours.metadata[0], name), getattr(theirs.metadata[0], name)), name
    assert torch.equal(ours.rows, theirs.rows)
    assert ours.rows.tolist()[: len(lens)] == step(lens).rows.tolist()


def test_a_common_prefix_has_a_graph_per_batch_size() -> None:
    """Contexts are padded to the model's length; padding has no prefix, whatever was there."""
    used = StaticInputs(step([(1, 30)]), config(), 512)
    for count, tokens in ((8, 32), (5, 16)):
        inputs = step([(1, 70)] * count)
        prefix = CommonPrefix(
            torch.tensor([0, *[tokens] * (count - 1)], dtype=torch.int32),
            torch.tensor([0, count, tokens + count], dtype=torch.int32),
            inputs.metadata[0].block_table[1],
        )
        metadata = (dataclasses.replace(inputs.metadata[0], prefix=prefix),)
        shape = padded_shape(dataclasses.replace(inputs, metadata=metadata), config(), 512)
        assert (shape.num_seqs, shape.max_seq_len, shape.prefixed) == (8, 512, (0,))
        used.load(shape, dataclasses.replace(inputs, metadata=metadata))
        found = used.current(shape).metadata[0].prefix
        assert found is not None
        assert found.lens.tolist() == [0, *[tokens] * (count - 1), *[0] * (8 - count)]
        assert found.bounds.tolist() == [0, count, tokens + count]
        assert torch.equal(found.block_table[:5], prefix.block_table)
    plain = padded_shape(step([(1, 70)] * 8), config(), 512)
    assert used.current(plain).metadata[0].prefix is None


def test_padding_of_a_decode_is_one_token_in_the_null_block() -> None:
    inputs = step([(1, 30)] * 3)
    shape, static = padded_shape(inputs, config(), 512), StaticInputs(inputs, config(), 512)
    static.load(shape, inputs)
    metadata = static.current(shape).metadata[0]
    assert metadata.query_start.tolist() == [0, 1, 2, 3, 4]
    assert metadata.seq_lens.tolist() == [30, 30, 30, 1]
    assert metadata.slot_mapping.tolist() == [100, 101, 102, 0]
    assert not metadata.block_table[3].any()


def test_inputs_of_a_steady_decode_are_loaded_by_three_copies() -> None:
    """Tensors of one type arrive together; a block table is a part of its rows."""
    inputs = step([(1, 30)] * 3)
    shape, static = padded_shape(inputs, config(), 512), StaticInputs(inputs, config(), 512)
    static.load(shape, inputs)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        static.load(shape, inputs)
    writes = {"aten::_foreach_copy_", "aten::copy_", "aten::fill_", "aten::zero_"}
    names = [event.name for event in recorded.events() or () if event.cpu_parent is None]
    assert [name for name in names if name in writes] == [
        "aten::_foreach_copy_",
        "aten::_foreach_copy_",
        "aten::copy_",
    ]
