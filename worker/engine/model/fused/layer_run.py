"""One or more decoder layers as one call: norms, products, rotation, cache write, attention and additions in C++.

Of a row of layers each works in place on what the one before it made. It knows packed hidden states, the step and
the layers' parts, and no modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from worker.engine.attention.cpu import CpuAttention
from worker.engine.kernels.program import Program
from worker.engine.model.fused.last_layer import LastLayerCalls, of_rows
from worker.engine.model.fused.layer_calls import LayerCalls, LayerParts, Scratch
from worker.engine.model.paged import LayerBinding, PagedStep


class LayerRun:
    """The layers' kernel calls as one program, built for a backend when that is first seen."""

    def __init__(self, parts: Sequence[LayerParts], scratch: Scratch) -> None:
        self._parts = tuple(parts)
        self._scratch = scratch
        self._calls = [LayerCalls(part) for part in parts]
        # A single layer has none before it, whose rows could stand in `out` for those left out.
        self._narrow = LastLayerCalls(parts[-1]) if len(parts) > 1 else None
        self._every = list(zip(self._calls, self._parts, strict=True))
        if self._narrow is not None:
            self._every.append((self._narrow, parts[-1]))
        self._layer_ids = [part.attention.layer_idx for part in parts]
        self._backend: CpuAttention | None = None
        self._bound: list[LayerBinding] = []
        self._workspace = (0, 0)
        self._version = self._num_tokens = -1
        for part in parts:
            scratch.reserve(part.widths, part.weights)

    def __call__(self, hidden_states: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
        """The rows that the layers make of `[1, num_tokens, hidden]`, called with the arguments of Transformers'
        decoder layers; None where these are not what the kernels take. Rows that the step does not read may hold
        what the layer before the last made of them.
        """
        step, tables = kwargs.get("paged"), kwargs.get("position_embeddings")
        if not isinstance(step, PagedStep) or not isinstance(step.backend, CpuAttention) or tables is None:
            return None
        if not all(_is_plain(tensor) for tensor in (hidden_states, *tables)):
            return None
        bindings = [step.layers[index] for index in self._layer_ids]
        self._adapt(hidden_states.shape[-2], step.backend, bindings, step)
        out = torch.empty_like(hidden_states)
        x, y = hidden_states.data_ptr(), out.data_ptr()
        narrow = self._narrow if _are_few(step.rows, hidden_states.shape[-2]) else None
        for calls, binding in zip(self._calls if narrow is None else self._calls[:-1], bindings, strict=False):
            calls.use(x, y, tables, step.metadata[binding.group])
            x = y
        self._give_workspace(0)
        if narrow is None:
            self._program.run(torch.get_num_threads(), self._give_workspace)
            return out
        assert step.rows is not None
        metadata = of_rows(step.metadata[bindings[-1].group], step.rows)  # kept while the kernels read it
        narrow.narrow(step.rows)
        narrow.use(x, y, tables, metadata)
        stop = None if step.rows.numel() else self._without_last + narrow.num_steps_for_cache
        self._narrow_program.run(torch.get_num_threads(), self._give_workspace, stop)
        return out

    def _adapt(self, num_tokens: int, backend: CpuAttention, bindings: list[LayerBinding], step: PagedStep) -> None:
        """Bring the arguments up to date that are not new in every call."""
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
        if len(self._bound) != len(bindings) or any(a is not b for a, b in zip(self._bound, bindings, strict=True)):
            for calls, parts in self._every:
                binding = step.layers[parts.attention.layer_idx]
                calls.bind(binding, step.metadata[binding.group])
            self._bound = bindings

    def _build(self, backend: CpuAttention) -> None:
        steps = [calls.steps(backend) for calls in self._calls]
        before = [step for layer in steps[:-1] for step in layer]
        self._program = Program([*before, *steps[-1]])
        if self._narrow is not None:
            self._narrow_program = Program([*before, *self._narrow.steps(backend)])
        self._without_last = len(before)
        self._backend = backend

    def _give_workspace(self, num_bytes: int) -> None:
        assert self._backend is not None
        workspace = self._backend.workspace(num_bytes)
        if workspace != self._workspace:
            self._workspace = workspace
            for calls, _ in self._every:
                calls.attend.workspace, calls.attend.workspace_bytes = workspace


def _are_few(rows: Tensor | None, num_tokens: int) -> bool:
    """Is gathering them worth it?"""
    return rows is not None and 2 * rows.numel() <= num_tokens


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.numel() > 0
