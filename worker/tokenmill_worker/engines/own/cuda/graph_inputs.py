"""Pads steps to few shapes, in tensors at fixed addresses that all CUDA graphs read.

Padding tokens are token 0 at position 0 and write to the null block. In a decode each of them is a
sequence of one token; in a mixed step they belong to no sequence. Output rows of padding are cut
off.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention import AttentionMetadata, CommonPrefix
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.device import StepInputs
from tokenmill_worker.engines.own.plan import MAX_DRAFTS

LARGEST_MIXED = 1024  # tokens; larger steps run longer than their launch takes
BATCH_STEP = 32  # sequences; smaller decodes are padded to powers of two, larger ones to multiples


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """All that a graph depends on.

    In a decode every sequence, padding included, has one token. Attention is planned for
    `max_seq_len`, so lengths are few powers of two. Decodes with a common prefix are planned for
    the model's length, so they need one graph for each batch.
    """

    is_decode: bool
    num_tokens: int
    num_seqs: int
    num_rows: int
    max_seq_len: int
    is_adapted: bool = False  # rows may have LoRA adapters
    prefixed: tuple[int, ...] = ()  # layer groups with a common prefix

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
    prefixed = tuple(i for i, group in enumerate(inputs.metadata) if group.prefix is not None)
    length = padded_length(metadata.max_seq_len, config, max_model_len)
    is_adapted = inputs.adapter_slots is not None
    if metadata.max_query_len == 1:
        size = padded_batch(num_seqs)
        length = max_model_len if prefixed else length
        return PaddedShape(True, size, size, size, length, is_adapted, prefixed)
    return PaddedShape(
        False,
        _multiple(num_tokens, config.q_padding_interval),
        _power_of_two(num_seqs),
        _power_of_two(num_rows),
        length,
        is_adapted,
    )


def padded_batch(num_seqs: int) -> int:
    """Round up to 1, 2, 4, 8, 16, then to multiples of 32.

    A step reads all weights whatever its batch: 31 rows of padding are at most 2 % of its bytes.
    """
    return _multiple(num_seqs, min(BATCH_STEP, _power_of_two(num_seqs)))


def padded_length(length: int, config: EngineConfig, max_model_len: int) -> int:
    """Round up to `kv_padding_interval` times a power of two, but not beyond the model's length."""
    interval = config.kv_padding_interval
    return max(min(interval * _power_of_two(-(-length // interval)), max_model_len), length)


def padded_lengths(config: EngineConfig, max_model_len: int) -> tuple[int, ...]:
    """Return every padded length, in ascending order."""
    lengths = [padded_length(1, config, max_model_len)]
    while lengths[-1] < max_model_len:
        lengths.append(padded_length(lengths[-1] + 1, config, max_model_len))
    return tuple(lengths)


def most_seqs(config: EngineConfig) -> int:
    """Return the sequences of the largest padded step."""
    return max(padded_batch(config.max_num_seqs), _power_of_two(config.max_num_seqs))


def most_rows(config: EngineConfig) -> int:
    """Return the sampled rows of the largest padded step, drafts included."""
    drafted = _power_of_two(config.max_num_seqs + MAX_DRAFTS)
    return max(most_seqs(config), min(drafted, LARGEST_MIXED))


class StaticInputs:
    """Static input tensors, shared by the graphs of all shapes.

    `load` copies a step into them; `current` returns the inputs of the forward pass. Padding is
    written only where an earlier step left other values, so a steady batch costs only the copies.
    """

    def __init__(self, example: StepInputs, config: EngineConfig, max_model_len: int) -> None:
        device, seqs = example.input_ids.device, most_seqs(config)
        tokens = max(seqs, _multiple(LARGEST_MIXED, config.q_padding_interval))

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self._input_ids, self._positions = zeros(tokens), zeros(tokens)
        self._rows = zeros(most_rows(config))
        self._adapter_slots = zeros(tokens) - 1
        self._starts_of_decode = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        self._starts = zeros(seqs + 1, dtype=torch.int32)
        self._lens_of_decode = zeros(seqs, dtype=torch.int32) + 1
        self._lens = zeros(seqs, dtype=torch.int32)
        self._slots = [zeros(tokens) for _ in example.metadata]
        self._tables = [
            zeros(seqs, -(-max_model_len // group.block_size) + 1, dtype=torch.int32)
            for group in example.metadata
        ]
        self._prefixes = [
            CommonPrefix(
                zeros(seqs, dtype=torch.int32),
                zeros(3, dtype=torch.int32),
                zeros(table.shape[1], dtype=torch.int32),
            )
            for table in self._tables
        ]
        self._layouts = example.metadata
        # how far values of earlier steps reach: in tokens, sampled rows, lengths of mixed steps and
        # of decodes, block tables, and adapters
        self._stale = dict.fromkeys(("tokens", "rows", "mixed", "decodes", "tables", "adapters"), 0)

    def load(self, shape: PaddedShape, inputs: StepInputs) -> None:
        first, stale = inputs.metadata[0], self._stale
        num_tokens, num_seqs = inputs.input_ids.shape[0], first.num_seqs
        longs = [
            (self._input_ids, inputs.input_ids),
            (self._positions, inputs.positions),
            (self._rows, inputs.rows),
            *((own, group.slot_mapping) for own, group in self._by_group(self._slots, inputs)),
        ]
        if inputs.adapter_slots is not None:
            longs.append((self._adapter_slots, inputs.adapter_slots))
            _pad(self._adapter_slots, num_tokens, stale["adapters"], -1)
            stale["adapters"] = num_tokens
        lens = self._lens_of_decode if shape.is_decode else self._lens
        shorts = [(lens, first.seq_lens)]
        if not shape.is_decode:
            shorts.append((self._starts, first.query_start))
        for prefix, group in zip(self._prefixes, inputs.metadata, strict=True):
            if group.prefix is not None:
                shorts += zip(prefix, group.prefix, strict=True)
                _pad(prefix.lens, num_seqs, shape.num_seqs)
        for pairs in (longs, shorts):
            _copy(pairs)
        for own in (self._input_ids, self._positions, *self._slots):
            _pad(own, num_tokens, stale["tokens"])
        _pad(self._rows, inputs.rows.shape[0], stale["rows"])
        kind = "decodes" if shape.is_decode else "mixed"
        _pad(lens, num_seqs, stale[kind], int(shape.is_decode))
        if not shape.is_decode:
            _pad(self._starts, num_seqs + 1, shape.num_seqs + 1, num_tokens)
        for table, group in self._by_group(self._tables, inputs):
            table[:num_seqs, : group.block_table.shape[1]].copy_(group.block_table)
            _pad(table, num_seqs, stale["tables"])
        stale |= {"tokens": num_tokens, "rows": inputs.rows.shape[0], "tables": num_seqs}
        stale[kind] = num_seqs

    @staticmethod
    def _by_group(
        own: list[Tensor], inputs: StepInputs
    ) -> Iterable[tuple[Tensor, AttentionMetadata]]:
        return zip(own, inputs.metadata, strict=True)

    def current(self, shape: PaddedShape) -> StepInputs:
        """Return a new StepInputs over the static tensors.

        It is a new object at each call, because attention backends keep what they derive from one.
        Host-side lengths are left out: a graph would keep those of the captured step.
        """
        tokens, seqs = shape.num_tokens, shape.num_seqs
        prefixes = [
            own._replace(lens=own.lens[:seqs]) if index in shape.prefixed else None
            for index, own in enumerate(self._prefixes)
        ]
        starts = self._starts_of_decode if shape.is_decode else self._starts
        lens = self._lens_of_decode if shape.is_decode else self._lens
        metadata = tuple(
            replace(
                layout,
                query_start=starts[: seqs + 1],
                seq_lens=lens[:seqs],
                block_table=table[:seqs, : -(-shape.max_seq_len // layout.block_size)],
                slot_mapping=slots[:tokens],
                max_query_len=shape.max_query_len,
                max_seq_len=shape.max_seq_len,
                query_lens_host=(),
                seq_lens_host=(),
                prefix=prefix,
            )
            for layout, table, slots, prefix in zip(
                self._layouts, self._tables, self._slots, prefixes, strict=True
            )
        )
        return StepInputs(
            self._input_ids[:tokens],
            self._positions[:tokens],
            self._rows[: shape.num_rows],
            metadata,
            self._adapter_slots[:tokens] if shape.is_adapted else None,
        )


def _copy(pairs: Seq[tuple[Tensor, Tensor]]) -> None:
    """Copy each source to the front of its target: tensors of one type, by one launch on CUDA."""
    targets = [target[: source.shape[0]] for target, source in pairs]
    torch._foreach_copy_(targets, [source for _, source in pairs])


def _pad(target: Tensor, count: int, stale: int, padding: int = 0) -> None:
    """Write `padding` behind the first `count` up to `stale`; the rest holds padding already."""
    if stale > count:
        target[count:stale].fill_(padding)


def _multiple(number: int, step: int) -> int:
    return -(-number // step) * step


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
