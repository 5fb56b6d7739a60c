"""Attention function for Transformers' AttentionInterface, and the step that it reads.

The model's own code calls it in every layer with packed queries, keys and values. The step travels
to it as the keyword argument `paged`. It writes the keys and values to the layer group's pool and
attends through the backend. No mask function is registered, on purpose: Transformers then builds no
mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tokenmill_worker.engines.own.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    KVScales,
)
from tokenmill_worker.engines.own.config.cache import LayerGroup, Window
from tokenmill_worker.engines.own.model.recurrent_states import LayerStates, RecurrentStep, RunLayer

IMPLEMENTATION = "tokenmill"


class AttentionStep(Protocol):
    """Value of the keyword argument `paged` during a forward pass."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        extras: dict[str, Any],
    ) -> Tensor:
        """Return the attended queries; queries, keys and values are `[num_tokens, heads,
        head_dim]`.
        """
        ...

    def recur(self, layer: int, run: RunLayer, hidden: Tensor) -> Tensor:
        """Return the output of a recurrent layer, given by its index and what runs it.

        Hidden states and output are `[1, num_tokens, hidden_size]`.
        """
        ...


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the step, as an attention function of Transformers.

    `query` is `[1, num_heads, num_tokens, head_dim]`; the result has heads and tokens swapped.
    """
    step = step_of(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    latent = getattr(module, "latent_form", None)  # of model/latent_attention.py
    if latent is not None:
        query = latent.of_query(query)
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    attended = step.attend(module, query, key, value, scale, kwargs)
    if latent is not None:
        attended = latent.of_output(attended)
    return attended.contiguous().unsqueeze(0), None


class StepNotPassedError(RuntimeError):
    """A layer's attention was called without its step."""


class StepHolder:
    """Holds a step for attention modules whose callers do not pass keyword arguments on."""

    def __init__(self) -> None:
        self.step: AttentionStep | None = None
        self.positions: Tensor | None = None  # [1, num_tokens]
        self.has_biases = False  # of ALiBi, in the keys of some layer

    @classmethod
    def attach(cls, model: nn.Module) -> StepHolder:
        """Make each call of the model store its step in a holder that its attention modules
        read.
        """
        holder = cls()
        model.register_forward_pre_hook(holder._keep, with_kwargs=True)
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.step_holder = holder  # type: ignore[assignment]
        return holder

    def _keep(self, _module: nn.Module, _arguments: Any, kwargs: dict[str, Any]) -> None:
        self.step = kwargs.get("paged")
        self.positions = kwargs.get("position_ids")


def step_of(module: nn.Module, kwargs: dict[str, Any]) -> AttentionStep:
    """Remove the step from the keyword arguments, or read the module's holder; raises
    StepNotPassedError.
    """
    step: AttentionStep | None = kwargs.pop("paged", None)
    if step is None and (holder := getattr(module, "step_holder", None)) is not None:
        step = holder.step
    if step is None:
        raise StepNotPassedError(
            f"{type(module).__name__} runs outside of a step of the engine, which has replaced its "
            "attention, or does not pass keyword arguments on to it"
        )
    return step


# code of a mask in a probing pass; a window of W tokens is CAUSAL - 2W, a chunked one is 1 less
CAUSAL = -1.0


def mask_code_of(window: Window | None) -> float:
    """Return the code of a causal mask with this window."""
    return CAUSAL if window is None else CAUSAL - 2 * window.size - window.is_chunked


def register() -> None:
    """Register `attn_implementation="tokenmill"` with Transformers; calling it again changes
    nothing.
    """
    AttentionInterface.register(IMPLEMENTATION, paged_attention)


@dataclass(frozen=True, slots=True)
class LayerBinding:
    """Location of one layer's keys and values, its attention shape and its scales, if any."""

    group: int
    cache: Tensor  # [num_blocks, 2, *block_shape]
    shape: AttentionShape
    scales: KVScales | None = None


def bind_layers(
    groups: Seq[LayerGroup],
    shapes: Mapping[int, AttentionShape],
    cache_of: Callable[[int, int], Tensor],
    scales: Mapping[int, KVScales] | None = None,
) -> dict[int, LayerBinding]:
    """Return the binding of each layer that attends, by the layer's index.

    `cache_of` returns the blocks of a group's layer, given by the indices of both. `scales` are
    the layers' scales; None where they have none.
    """
    return {
        layer: LayerBinding(
            group, cache_of(group, index), shapes[layer], scales[layer] if scales else None
        )
        for group, members in enumerate(groups)
        for index, layer in enumerate(members.layers)
    }


@runtime_checkable
class RotatingBackend(Protocol):
    """A backend that applies the rotary embedding and writes keys and values in one pass."""

    def rope_and_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step: the bindings of the layers that attend (the same for every step) and the metadata
    of each layer group.

    Only `rows` of the last layer's output are read (int64, ascending; None: all); the others need
    not be computed. `recurrence` runs the recurrent layers, if there are any.
    """

    backend: AttentionBackend
    layers: Mapping[int, LayerBinding]
    metadata: Seq[AttentionMetadata]
    rows: Tensor | None = None
    recurrence: RecurrentStep | None = None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        extras: dict[str, Any],
    ) -> Tensor:
        index: Any = module.layer_idx
        binding = self.layers[index]
        metadata = self.metadata[binding.group]
        key_size, value_size = key.shape[-1], value.shape[-1]
        if key_size != value_size:
            query, key, value = (
                _padded(states, binding.shape.head_dim) for states in (query, key, value)
            )
        scales = binding.scales
        if scales is not None:
            query, (key, value) = scales.of_query(query), scales.divided(key, value)
        self.backend.write(key, value, binding.cache, metadata)
        attended = self.backend.attend(
            query, binding.cache, metadata, binding.shape, extras.get("s_aux")
        )
        if scales is not None:
            attended = scales.of_output(attended)
        return attended[..., :value_size]

    def recur(self, layer: int, run: RunLayer, hidden: Tensor) -> Tensor:
        assert self.recurrence is not None, "the step has no recurrent states"
        return self.recurrence.recur(layer, run, hidden)

    @property
    def can_rotate(self) -> bool:
        """Return whether the backend rotates and writes in one pass."""
        return isinstance(self.backend, RotatingBackend)

    def rotate_and_attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tables: tuple[Tensor, Tensor],
        sinks: Tensor | None,
    ) -> Tensor:
        """Rotate queries and keys, then attend like `attend`.

        `tables` are cosines and sines `[num_tokens, rotary_dim]`.
        """
        index: Any = module.layer_idx
        binding = self.layers[index]
        metadata = self.metadata[binding.group]
        backend: Any = self.backend
        scales = binding.scales
        if scales is not None:
            query, (key, value) = scales.of_query(query), scales.divided(key, value)
        query = backend.rope_and_write(query, key, value, *tables, binding.cache, metadata)
        attended = self.backend.attend(query, binding.cache, metadata, binding.shape, sinks)
        return attended if scales is None else scales.of_output(attended)


def _padded(states: Tensor, head_dim: int) -> Tensor:
    """Heads of the cache's size: zeros behind queries and keys change no product, those behind
    values are cut off.
    """
    missing = head_dim - states.shape[-1]
    return nn.functional.pad(states, (0, missing)) if missing else states


@dataclass(frozen=True, slots=True)
class LayerTrait:
    """Observations of one layer's attention in a probing pass."""

    shape: AttentionShape
    # code of the mask it was given (probe.py); None: the model made the mask itself
    mask_code: float | None
    extras: frozenset[str]  # names of further keyword arguments that were not None


@dataclass(slots=True)
class Probe:
    """A step that records how each layer calls the attention function."""

    layers: dict[int, LayerTrait] = field(default_factory=dict)
    state_bytes: dict[int, int] = field(default_factory=dict)  # of a sequence, by recurrent layer
    repeated: set[int] = field(default_factory=set)  # layers whose attention ran more than once
    rows: list[Tensor] | None = None  # queries, keys and values of every layer, if recorded

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        extras: dict[str, Any],
    ) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise RuntimeError(f"{type(module).__name__} has no layer_idx")
        if index in self.layers:
            self.repeated.add(index)
        if self.rows is not None:
            self.rows += [query, key, value]
        softcap, code = extras.get("softcap"), extras.pop("mask_code", None)
        shape = AttentionShape(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            # the cache keeps keys and values in heads of one size
            head_dim=max(query.shape[2], value.shape[2]),
            scale=scale,
            softcap=None if softcap is None else float(softcap),
        )
        given = frozenset(name for name, extra in extras.items() if extra is not None)
        self.layers[index] = LayerTrait(shape, code, given)
        return torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)

    def recur(self, layer: int, run: RunLayer, hidden: Tensor) -> Tensor:
        """Run a recurrent layer on one sequence; on sequences of one token if rows are recorded."""
        sequences = hidden if self.rows is None else hidden.transpose(0, 1)
        states = LayerStates()
        out = run(sequences, states)
        self.state_bytes[layer] = states.num_bytes // len(sequences)
        return out.view_as(hidden)
