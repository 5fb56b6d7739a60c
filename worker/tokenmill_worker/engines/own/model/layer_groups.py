"""Builds layer groups from the probing pass: layers whose keys and values are stored alike form a
group. Layers that keep a recurrent state, or nothing, are in none.

Layers with the same window, key heads and head size share block ids. A model whose keys and values
the cache cannot store is refused here, with one sentence per reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill_worker.engines.own.attention import AttentionShape
from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.config.cache import LayerGroup, Window, with_common_blocks
from tokenmill_worker.engines.own.model.paged_attention import LayerTrait, Probe
from tokenmill_worker.engines.own.model.probe import is_served, window_of

_WITHOUT_CACHE = {"mlp", "moe"}  # types of layers without attention and without a state
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}  # types of layers
_UNSUPPORTED = {
    "position_bias": "a bias on attention logits",
    "alibi": "a bias on attention logits",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "sinks": "sinks of its own kind",
}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Attention shape and window of one layer, as the cache and the attention backend need them."""

    shape: AttentionShape
    window: Window | None


Layers = Sequence[LayerKind | None]  # by index; None: the layer keeps no keys and values


def describe_layers(probe: Probe, config: Any, name: str, length: int) -> Layers:
    """Return the layers, for sequences of up to `length` tokens.

    Raises EngineConfigError with one sentence for each reason that they cannot be served.
    """
    stated = getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None)
    num_layers = int(stated or len(probe.layers))
    types = dict(enumerate(getattr(config, "layer_types", None) or ()))
    without_cache = {index for index, kind in types.items() if kind in _WITHOUT_CACHE}
    problems = []
    missing = set(range(num_layers)) - probe.layers.keys() - probe.state_bytes.keys()
    if missing := missing - without_cache:
        problems.append(
            f"{len(missing)} of its {num_layers} layers do not go through Transformers' "
            "AttentionInterface"
        )
    elif max(probe.layers, default=0) >= num_layers:
        problems.append(f"{len(probe.layers)} layers attend, its configuration says {num_layers}")
    elif not probe.layers:
        problems.append("none of its layers attends")
    if probe.repeated:
        problems.append(f"layer {min(probe.repeated)} runs its attention more than once")
    known = without_cache | probe.state_bytes.keys()
    unknown = {kind for index, kind in types.items() if index not in known} - _ATTENDING
    if unknown:
        problems.append(f"its layers are of type {', '.join(sorted(unknown))}")
    first: dict[str, int] = {}
    for index, trait in sorted(probe.layers.items()):
        for reason in _reasons(trait):
            first.setdefault(reason, index)
    problems += [f"layer {index} {reason}" for reason, index in first.items()]
    layers: Layers = []
    if not problems:
        traits = map(probe.layers.get, range(num_layers))
        layers = [None if trait is None else _kind(trait) for trait in traits]
        problems = _window_problems(layers, config, length)
    if problems:
        raise EngineConfigError([f"{name} cannot be served: {problem}" for problem in problems[:3]])
    return layers


def shapes_of(layers: Layers) -> dict[int, AttentionShape]:
    """Return the attention shapes of the layers that attend, by index."""
    return {index: layer.shape for index, layer in enumerate(layers) if layer is not None}


def group_layers(layers: Layers) -> tuple[LayerGroup, ...]:
    """Group the layers that attend; groups are in the order of their first layers."""
    members: dict[tuple[int, int, Window | None], list[int]] = {}
    for index, layer in enumerate(layers):
        if layer is None:
            continue
        key = (layer.shape.num_kv_heads, layer.shape.head_dim, layer.window)
        members.setdefault(key, []).append(index)
    return with_common_blocks(
        [
            LayerGroup(tuple(indices), heads, dim, window)
            for (heads, dim, window), indices in members.items()
        ]
    )


def _kind(trait: LayerTrait) -> LayerKind:
    window = window_of(trait.mask_code or 0.0)
    return LayerKind(replace(trait.shape, is_chunked=bool(window and window.is_chunked)), window)


def _reasons(trait: LayerTrait) -> list[str]:
    found = [f"needs {what}" for extra, what in _UNSUPPORTED.items() if extra in trait.extras]
    if trait.mask_code is None:
        found.append("makes an attention mask of its own")
    elif not is_served(trait.mask_code):
        found.append("has an attention mask that is not causal, sliding or chunked")
    return found


def _window_problems(layers: Layers, config: Any, length: int) -> list[str]:
    """Return a problem if the configured window is shorter than `length` and a sliding layer's mask
    lacks it.

    Transformers' cache drops tokens outside of the configured window, whether or not the layer's
    mask has one.
    """
    window = getattr(config, "sliding_window", None)
    if window is None or window >= length or getattr(config, "use_sliding_window", True) is False:
        return []
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers)
    return [
        f"its configuration has a window of {window} tokens that layer {index} does not build: "
        f"set max_model_len to at most {window}"
        for index, (layer, kind) in enumerate(zip(layers, types, strict=False))
        if kind == "sliding_attention" and layer is not None and layer.window is None
    ][:1]
