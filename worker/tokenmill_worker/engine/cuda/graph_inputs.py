"""Pads steps to few shapes, in tensors at fixed addresses that a CUDA graph reads.

Padding tokens are token 0 at position 0 and write to the null block. In a decode each of them is a
sequence of one token; in a mixed step they belong to no sequence. Output rows of padding are cut
off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.device import StepInputs

# up to this many sequences, decodes are padded to powers of two; beyond, to multiples
EXACT_BATCHES = 4
# (up to this many sequences, padded to a multiple of)
BATCH_STEPS = ((64, 8), (256, 16), (1 << 30, 64))


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """All that a graph depends on.

    In a decode every sequence, padding included, has one token.
    """

    is_decode: bool
    num_tokens: int
    num_seqs: int
    num_rows: int
    max_seq_len: int

    @property
    def max_query_len(self) -> int:
        return 1 if self.is_decode else self.num_tokens


def padded_shape(inputs: StepInputs, config: EngineConfig, max_model_len: int) -> PaddedShape:
    """Return the smallest padded shape that holds the step; lengths do not exceed the model's."""
    metadata = inputs.metadata[0]
    num_tokens, num_seqs, num_rows = (
        inputs.input_ids.shape[0],
        metadata.num_seqs,
        inputs.rows.shape[0],
    )
    length = _multiple(metadata.max_seq_len, config.kv_padding_interval)
    length = max(min(length, max_model_len), metadata.max_seq_len)
    if metadata.max_query_len == 1:
        size = padded_batch(num_seqs)
        return PaddedShape(True, size, size, size, length)
    return PaddedShape(
        False,
        _multiple(num_tokens, config.q_padding_interval),
        _power_of_two(num_seqs),
        _power_of_two(num_rows),
        length,
    )


def padded_batch(num_seqs: int) -> int:
    """Round up to 1, 2, 4, then multiples of 8 up to 64, of 16 up to 256, of 64 beyond."""
    if num_seqs <= EXACT_BATCHES:
        return _power_of_two(num_seqs)
    step = next(step for limit, step in BATCH_STEPS if num_seqs <= limit)
    return _multiple(num_seqs, step)


class StaticInputs:
    """Static input tensors of one shape.

    `load` copies a step into them; `current` returns the inputs of the forward pass. Padding is
    written only where the previous step left other values, so a steady batch costs only the copies.
    """

    def __init__(self, shape: PaddedShape, example: StepInputs) -> None:
        device = example.input_ids.device
        self.shape = shape

        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self._input_ids = zeros(shape.num_tokens, dtype=torch.int64)
        self._positions = zeros(shape.num_tokens, dtype=torch.int64)
        self._rows = zeros(shape.num_rows, dtype=torch.int64)
        self._query_start = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.full(
            (shape.num_seqs,), int(shape.is_decode), dtype=torch.int32, device=device
        )
        self._slots: list[Tensor] = []
        self._tables: list[Tensor] = []
        for group in example.metadata:
            width = max(-(-shape.max_seq_len // group.block_size), group.block_table.shape[1])
            self._slots.append(zeros(shape.num_tokens, dtype=torch.int64))
            self._tables.append(zeros(shape.num_seqs, width, dtype=torch.int32))
        self._layouts = example.metadata
        self._loaded = (0, 0)  # tokens and sequences of the previous step

    def load(self, inputs: StepInputs) -> None:
        first = inputs.metadata[0]
        num_tokens, num_seqs = inputs.input_ids.shape[0], first.num_seqs
        stale_tokens, stale_seqs = (
            max(was, now) for was, now in zip(self._loaded, (num_tokens, num_seqs), strict=True)
        )
        _fill(self._input_ids, inputs.input_ids, stale_tokens)
        _fill(self._positions, inputs.positions, stale_tokens)
        self._rows[: inputs.rows.shape[0]].copy_(inputs.rows)
        _fill(self._seq_lens, first.seq_lens, stale_seqs, int(self.shape.is_decode))
        if not self.shape.is_decode:
            _fill(self._query_start, first.query_start, self.shape.num_seqs + 1, num_tokens)
        for slots, table, group in zip(self._slots, self._tables, inputs.metadata, strict=True):
            _fill(slots, group.slot_mapping, stale_tokens)
            table[:num_seqs, : group.block_table.shape[1]].copy_(group.block_table)
            if stale_seqs > num_seqs:
                table[num_seqs:stale_seqs].zero_()
        self._loaded = (num_tokens, num_seqs)

    def current(self) -> StepInputs:
        """Return a new StepInputs over the static tensors.

        It is a new object at each call, because attention backends keep what they derive from one.
        Host-side lengths are left out: a graph would keep those of the captured step.
        """
        metadata = tuple(
            replace(
                layout,
                query_start=self._query_start,
                seq_lens=self._seq_lens,
                block_table=table,
                slot_mapping=slots,
                max_query_len=self.shape.max_query_len,
                max_seq_len=self.shape.max_seq_len,
                query_lens_host=(),
                seq_lens_host=(),
            )
            for layout, table, slots in zip(self._layouts, self._tables, self._slots, strict=True)
        )
        return StepInputs(self._input_ids, self._positions, self._rows, metadata)


def _fill(target: Tensor, source: Tensor, stale: int, padding: int = 0) -> None:
    """Copy `source`, then write `padding` up to `stale`; the rest holds padding already."""
    count = source.shape[0]
    target[:count].copy_(source)
    if stale > count:
        target[count:stale].fill_(padding)


def _multiple(number: int, step: int) -> int:
    return -(-number // step) * step


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
