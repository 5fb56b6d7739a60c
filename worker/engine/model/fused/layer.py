"""A whole decoder layer as one call: norms, products, rotation, cache write, attention and additions in C++.

Stands in for a layer whose parts were swapped already, and runs those parts themselves wherever the step
is not one of the CPU backend's. It knows two shapes: pre-norm (Llama) and norms on both sides (Gemma).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worker.engine.attention import AttentionMetadata
from worker.engine.attention.cpu import CpuAttention
from worker.engine.kernels.program import Program
from worker.engine.model.fused.layer_calls import LayerCalls, LayerParts, Scratch
from worker.engine.model.paged import LayerBinding, PagedStep


class FusedLayer(nn.Module):
    """`layer` is the original with its parts swapped; what else it has is found through this one too."""

    def __init__(self, layer: nn.Module, parts: LayerParts, scratch: Scratch) -> None:
        super().__init__()
        self.layer = layer
        self._parts = parts
        self._scratch = scratch
        self._calls = LayerCalls(parts)
        self._layer_idx = parts.attention.layer_idx
        self._backend: CpuAttention | None = None
        self._binding: LayerBinding | None = None
        self._version = self._num_tokens = -1
        scratch.reserve(parts.widths, parts.weights)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        step, tables = kwargs.get("paged"), kwargs.get("position_embeddings")
        if not args and tables is not None and isinstance(step, PagedStep) and isinstance(step.backend, CpuAttention):
            binding = step.layers[self._layer_idx]
            if _is_plain(hidden_states) and _is_plain(tables[0]) and _is_plain(tables[1]):
                return self._run(hidden_states, tables, step.backend, binding, step.metadata[binding.group])
        return self.layer(hidden_states, *args, **kwargs)

    def _run(
        self,
        hidden_states: Tensor,
        tables: tuple[Tensor, Tensor],
        backend: CpuAttention,
        binding: LayerBinding,
        metadata: AttentionMetadata,
    ) -> Tensor:
        num_tokens, calls, scratch = hidden_states.shape[-2], self._calls, self._scratch
        scratch.fit(num_tokens)
        if self._version != scratch.version:
            calls.point(scratch, self._parts)
            self._version = scratch.version
        if self._num_tokens != num_tokens:
            calls.resize(num_tokens)
            self._num_tokens = num_tokens
        if self._backend is not backend:
            self._program = Program(calls.steps(backend))
            self._backend = backend
        if self._binding is not binding:
            calls.bind(binding, metadata)
            self._binding = binding
        out = torch.empty_like(hidden_states)
        calls.use(hidden_states.data_ptr(), out.data_ptr(), tables, metadata)
        backend.use_workspace(calls.attend, 0)
        self._program.run(scratch.num_threads, lambda missing: backend.use_workspace(calls.attend, missing))
        return out


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.numel() > 0
