"""The last decoder layer where few of its rows are read, as in the chunks of a prompt.

Keys and values are made of every token; attention and all behind it of the rows that somebody reads, which are
gathered for it and put back at the end. A row's result is the same either way, bit for bit, where no kernel's result
depends on the rows beside it (amx_float.h's do on whether these are few or many). llama.cpp leaves such rows out in
the same place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from worker.engine.attention import AttentionMetadata
from worker.engine.attention.cpu import CpuAttention
from worker.engine.kernels.program import RowArguments, Step, move_rows
from worker.engine.model.fused.layer_calls import LayerCalls, LayerParts, Scratch


class LastLayerCalls(LayerCalls):
    """As `LayerCalls`, for the rows given to `narrow`."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts)
        query = parts.widths["rotated"]
        self.write.rotated_stride = self.attend.query_stride = query
        self._queries = RowArguments(width=query)
        self._inputs = RowArguments(width=parts.hidden)
        self._outputs = RowArguments(width=parts.hidden)
        self.num_steps_for_cache = 0

    def steps(self, backend: CpuAttention) -> list[Step]:
        steps = super().steps(backend)
        attend = next(index for index, step in enumerate(steps) if step.arguments is self.attend)
        self.num_steps_for_cache = attend
        return [
            *steps[:attend],
            move_rows(self._queries),
            move_rows(self._inputs),
            *steps[attend:],
            move_rows(self._outputs),
        ]

    def point(self, scratch: Scratch, parts: LayerParts) -> None:
        super().point(scratch, parts)
        picked = scratch.at("picked")
        self.write.rotated = self._queries.source = scratch.at("rotated")
        self._inputs.target = self._outputs.source = self.gate_up.x = picked
        for arguments in self.after or (self.out, self.down):
            arguments.residual = arguments.y = picked
        self.attend.query = self._queries.target = scratch.at("picked_query")

    def narrow(self, rows: Tensor) -> None:
        """Which rows are read; after `resize`."""
        count, at = rows.numel(), rows.data_ptr()
        for arguments in (*self.after, self.out, self.gate_up, self.down):
            arguments.m = count
        for moves in (self._queries, self._inputs, self._outputs):
            moves.count = count
        self._queries.from_rows = self._inputs.from_rows = self._outputs.to_rows = at
        self.attend.num_tokens = count

    def use(self, hidden: int, metadata: AttentionMetadata) -> None:
        """What the layers before made and this one adds to; `metadata` as `of_rows` makes it."""
        self.qkv.x = self._inputs.source = self._outputs.target = hidden
        self.read(metadata)


def of_rows(metadata: AttentionMetadata, rows: Tensor) -> AttentionMetadata:
    """Each row as a sequence of its own that ends with it; slots stay those of all tokens."""
    starts, picked = metadata.query_start, rows.to(torch.int32)
    owners = torch.searchsorted(starts, picked, right=True) - 1
    return replace(
        metadata,
        query_start=torch.arange(rows.numel() + 1, dtype=torch.int32),
        seq_lens=metadata.seq_lens[owners] - (starts[owners + 1] - 1 - picked),
        block_table=metadata.block_table[owners],
        max_query_len=1,
        query_lens_host=(),
        seq_lens_host=(),
    )
