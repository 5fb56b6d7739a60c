"""Runs the last decoder layer where few of its rows are read, as in prefill chunks.

Keys and values are computed for every token. Attention and everything after it are computed only
for the rows that are read; these are gathered before and written back at the end. A row's result is
the same either way, bit for bit, where no kernel's result depends on the other rows. (In
amx_float.h it depends on whether there are few or many.) llama.cpp skips such rows at the same
point.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention import AttentionMetadata
from tokenmill_worker.engines.own.cpu.attention import CpuAttention
from tokenmill_worker.engines.own.cpu.fused.layer_calls import LayerCalls, LayerParts, Scratch
from tokenmill_worker.engines.own.cpu.kernels.program import KernelCall, RowArguments, move_rows


class LastLayerCalls(LayerCalls):
    """Kernel calls of the last layer, restricted to the rows given to `narrow`."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts)
        query = parts.widths["rotated"]
        self.write.rotated_stride = self.attend.query_stride = query
        self._queries = RowArguments(width=query)
        self._inputs = RowArguments(width=parts.hidden)
        self._outputs = RowArguments(width=parts.hidden)
        self.num_steps_for_cache = 0

    def steps(self, backend: CpuAttention) -> list[KernelCall]:
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
        """Set the rows that are read; call it after `resize`."""
        count, at = rows.numel(), rows.data_ptr()
        for arguments in (*self.after, self.out, self.gate_up, self.down):
            arguments.m = count
        for moves in (self._queries, self._inputs, self._outputs):
            moves.count = count
        self._queries.from_rows = self._inputs.from_rows = self._outputs.to_rows = at
        self.attend.num_tokens = count

    def use(self, hidden: int, metadata: AttentionMetadata) -> None:
        """Set the address of the layer's input, to which it adds, and the metadata made by
        `metadata_of_rows`.
        """
        self.qkv.x = self._inputs.source = self._outputs.target = hidden
        self.read(metadata)


def metadata_of_rows(metadata: AttentionMetadata, rows: Tensor) -> AttentionMetadata:
    """Return metadata in which each row is a sequence of its own that ends with it.

    The slots stay those of all tokens.
    """
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
