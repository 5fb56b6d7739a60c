"""Recurrent states: which slot a step reads and writes, and what a layer gets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenmill_worker.engines.own.model.recurrent_states import LayerStates, StatePool

LAYER = 3


def add_up(hidden: Tensor, states: LayerStates) -> Tensor:
    """Run a layer whose state is the sum of all tokens of its sequence; return the sums so far."""
    known = states.get_recurrent_state(LAYER)
    before = torch.zeros(len(hidden), 1, 1) if known is None else known
    sums = before + hidden.cumsum(dim=1)
    states.update_recurrent_state(sums[:, -1:], LAYER)
    return sums


def step(pool: StatePool, *sequences: tuple[int, int, list[float]]) -> list[float]:
    """Run a step of (row, first position, tokens)."""
    rows, starts, tokens = zip(*sequences, strict=True)
    lens = [len(one) for one in tokens]
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    packed = torch.tensor([token for one in tokens for token in one])[None, :, None]
    keys = [bytes([start]) for start in starts]
    return pool.step(rows, lens, ends, keys).recur(LAYER, add_up, packed).flatten().tolist()


def test_each_sequence_continues_from_its_own_state() -> None:
    pool = StatePool(2, torch.device("cpu"))
    assert step(pool, (0, 0, [1.0, 2.0]), (1, 0, [10.0])) == [1, 3, 10]
    assert step(pool, (1, 1, [5.0]), (0, 2, [4.0])) == [15, 7]  # decodes, together
    assert step(pool, (4, 0, [1.0]), (0, 3, [1.0, 1.0]), (1, 2, [1.0])) == [1, 8, 9, 16]
    assert step(pool, (1, 0, [2.0]), (4, 1, [2.0])) == [2, 3]  # row 1 has another sequence


def test_a_repeated_step_starts_from_the_same_state() -> None:
    pool = StatePool(1, torch.device("cpu"))
    step(pool, (0, 0, [1.0]))
    assert step(pool, (0, 1, [2.0])) == step(pool, (0, 1, [2.0])) == [3]
    assert step(pool, (0, 2, [3.0])) == [6]
    with pytest.raises(RuntimeError, match="has no recurrent states at token 1"):
        step(pool, (0, 1, [2.0]))


def test_a_released_row_has_no_state_and_its_checkpoints_stay() -> None:
    pool = StatePool(2, torch.device("cpu"), num_checkpoints=2)
    step(pool, (0, 0, [1.0, 2.0]), (1, 0, [7.0]))
    pool.keep(0, 2, bytes([2]))
    pool.keep(1, 1, bytes([1]))
    pool.release(0)
    assert step(pool, (0, 2, [4.0]), (1, 2, [5.0])) == [7, 8]  # both after 1.0 and 2.0
    pool.keep(0, 3, bytes([3]))  # in place of the other one, which no sequence has read lately
    assert [pool.has_checkpoint(bytes([key])) for key in (1, 2, 3)] == [False, True, True]
    pool.release(0)
    with pytest.raises(RuntimeError, match="has no recurrent states at token 1"):
        step(pool, (0, 1, [2.0]))


def test_a_convolution_sees_the_last_inputs_of_its_sequence() -> None:
    states = LayerStates()
    first = states.update_conv_state(torch.tensor([[[1.0, 2.0]]]), LAYER, conv_kernel_size=3)
    assert first.flatten().tolist() == [0, 1, 2]
    more = states.update_conv_state(torch.tensor([[[3.0, 4.0]]]), LAYER)
    assert more.flatten().tolist() == [0, 1, 2, 3, 4]
    kept = states.get_conv_state(LAYER)
    assert kept is not None
    assert kept.flatten().tolist() == [2, 3, 4]


def test_modules_of_older_transformers_read_states_from_cache_layers() -> None:
    states = LayerStates()
    assert not states.has_previous_state(LAYER)
    states.update_conv_state(torch.zeros(1, 1, 3), LAYER)
    states.update_recurrent_state(torch.ones(1, 2, 2), LAYER)
    assert states.has_previous_state(LAYER)
    assert not states.has_previous_state(LAYER, state_idx=1)
    layer = states.layers[LAYER]
    layer.conv_states[0].add_(1.0)  # in place, as in a decode
    assert states.get_conv_state(LAYER) is layer.conv_states[0]
    assert states.get_recurrent_state(LAYER) is layer.recurrent_states[0]
    assert not layer.record_past
