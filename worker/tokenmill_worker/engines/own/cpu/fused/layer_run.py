"""Runs one or more decoder layers as one call: norms, products, rotation, cache write, attention,
additions.

Each layer works in place on the output of the one before it. The input is packed hidden states, the
step and the layers' parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill_worker.engines.own.cpu.attention import CpuAttention
from tokenmill_worker.engines.own.cpu.fused.last_layer import LastLayerCalls, metadata_of_rows
from tokenmill_worker.engines.own.cpu.fused.layer_calls import (
    LayerCalls,
    LayerParts,
    LayerTable,
    Rotation,
    Scratch,
)
from tokenmill_worker.engines.own.cpu.kernels.program import KernelCall, Program
from tokenmill_worker.engines.own.model.paged_attention import LayerBinding, PagedStep


class LayerRun:
    """The layers' kernel calls as one program, built when a backend is first used."""

    def __init__(
        self,
        parts: Sequence[LayerParts],
        scratch: Scratch,
        before: Sequence[KernelCall] = (),
        after: Sequence[KernelCall] = (),
    ) -> None:
        """Reserve the buffers; `before` and `after` are further kernel calls of the same pass."""
        self._scratch = scratch
        self._before, self._after = tuple(before), tuple(after)
        self._calls = [LayerCalls(part) for part in parts]
        # With a single layer, no earlier layer's output would fill the rows of `out` that are left
        # out.
        self._narrow = LastLayerCalls(parts[-1]) if len(parts) > 1 else None
        self._table = LayerTable(self._calls, self._narrow)
        self._every = list(zip(self._calls, parts, strict=True))
        if self._narrow is not None:
            self._every.append((self._narrow, parts[-1]))
        self._layer_ids = [part.attention.layer_idx for part in parts]
        self._backend: CpuAttention | None = None
        self._layers: Mapping[int, LayerBinding] | None = None
        self._group = 0  # the last layer's
        self._workspace = (0, 0)
        self._version = self._num_tokens = -1
        for part in parts:
            scratch.reserve(part.widths, part.weights)

    def __call__(self, hidden_states: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the layers' output for `[1, num_tokens, hidden]`, or None where the kernels do not
        support the call.

        The arguments are those of Transformers' decoder layers. Rows that the step does not read
        may hold the output of the last layer but one.
        """
        step, tables = kwargs.get("paged"), kwargs.get("position_embeddings")
        if (
            not isinstance(step, PagedStep)
            or not isinstance(step.backend, CpuAttention)
            or tables is None
        ):
            return None
        if not all(is_plain(tensor) for tensor in (hidden_states, *tables)):
            return None
        (cos, sin), out = tables, torch.empty_like(hidden_states)
        rotation = Rotation(cos.data_ptr(), sin.data_ptr(), cos.shape[-1], cos.shape[-1])
        self.run(hidden_states.shape[-2], hidden_states.data_ptr(), out.data_ptr(), rotation, step)
        return out

    def run(self, num_tokens: int, x: int, out: int, rotation: Rotation, step: PagedStep) -> None:
        """Run the layers from the address `x` of packed rows to the address `out`.

        The calls after the layers run only if the step reads any row. Raises IndexError if a row to
        be moved does not exist.
        """
        assert isinstance(step.backend, CpuAttention)
        self._adapt(num_tokens, step.backend, step)
        self._table.use(x, out, rotation, step.metadata)
        self._give_workspace(0)
        narrow = self._narrow if _are_few(step.rows, num_tokens) else None
        if narrow is None:
            self._program.run(torch.get_num_threads(), self._give_workspace)
            return
        assert step.rows is not None
        # kept while the kernels read it
        metadata = metadata_of_rows(step.metadata[self._group], step.rows)
        narrow.narrow(step.rows)
        narrow.use(out, metadata)
        stop = None if step.rows.numel() else self._without_last + narrow.num_steps_for_cache
        self._narrow_program.run(torch.get_num_threads(), self._give_workspace, stop)

    def _adapt(self, num_tokens: int, backend: CpuAttention, step: PagedStep) -> None:
        """Update the arguments that do not change in every call."""
        scratch = self._scratch
        scratch.fit(num_tokens)
        if self._version != scratch.version:
            for calls, parts in self._every:
                calls.point(scratch, parts)
            self._version = scratch.version
        if self._num_tokens != num_tokens:
            for calls, _ in self._every:
                calls.resize(num_tokens)
            self._num_tokens = num_tokens
        if self._backend is not backend:
            self._build(backend)
        if self._layers is not step.layers:
            for calls, parts in self._every:
                binding = step.layers[parts.attention.layer_idx]
                calls.bind(binding, step.metadata[binding.group])
            groups = [step.layers[index].group for index in self._layer_ids]
            self._table.assign(groups)
            self._layers, self._group = step.layers, groups[-1]

    def _build(self, backend: CpuAttention) -> None:
        steps = [calls.steps(backend) for calls in self._calls]
        before = [*self._before, *(step for layer in steps[:-1] for step in layer)]
        self._program = Program([*before, *steps[-1], *self._after])
        if self._narrow is not None:
            self._narrow_program = Program([*before, *self._narrow.steps(backend), *self._after])
        self._without_last = len(before)
        self._backend = backend

    def _give_workspace(self, num_bytes: int) -> None:
        """Provide the number of bytes that attention needs; raises IndexError for the answer −1 of
        a row move.
        """
        if num_bytes < 0:
            raise IndexError("a row outside of its table")
        assert self._backend is not None
        workspace = self._backend.workspace(num_bytes)
        if workspace != self._workspace:
            self._workspace = workspace
            for calls, _ in self._every:
                calls.attend.workspace, calls.attend.workspace_bytes = workspace


def _are_few(rows: Tensor | None, num_tokens: int) -> bool:
    """Return whether the rows are few enough to gather them."""
    return rows is not None and 2 * rows.numel() <= num_tokens


def is_plain(tensor: Tensor) -> bool:
    """Return whether a kernel can read the tensor in place."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.numel() > 0
