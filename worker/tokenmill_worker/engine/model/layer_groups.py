"""Builds layer groups from the probing pass: layers whose keys and values are stored alike form a
group.

Layers with the same window, key heads and head size share block ids. A model whose keys and values
the cache cannot store is refused here, with one sentence per reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill_worker.engine.attention import AttentionShape
from tokenmill_worker.engine.cache_config import LayerGroup, with_common_blocks
from tokenmill_worker.engine.config import EngineConfigError
from tokenmill_worker.engine.model.paged_attention import LayerTrait, Probe
from tokenmill_worker.engine.model.probe import is_served, window_of

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
    window: int | None


def describe_layers(probe: Probe, config: Any, name: str, length: int) -> list[LayerKind]:
    """Return the layers by index, for sequences of up to `length` tokens.

    Raises EngineConfigError with one sentence for each reason that they cannot be served.
    """
    stated = getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None)
    num_layers = int(stated or len(probe.layers))
    problems = []
    if sorted(probe.layers) != list(range(num_layers)):
        missing = len(set(range(num_layers)) - probe.layers.keys())
        problems.append(
            f"{missing} of its {num_layers} layers do not go through Transformers' "
            "AttentionInterface"
            if missing
            else f"{len(probe.layers)} layers attend, its configuration says {num_layers}"
        )
    if probe.repeated:
        problems.append(f"layer {min(probe.repeated)} runs its attention more than once")
    problems += _config_problems(config)
    first: dict[str, int] = {}
    for index, trait in sorted(probe.layers.items()):
        for reason in _reasons(trait):
            first.setdefault(reason, index)
    problems += [f"layer {index} {reason}" for reason, index in first.items()]
    layers = []
    if not problems:
        layers = [
            LayerKind(trait.shape, window_of(trait.mask_code or 0.0))
            for _, trait in sorted(probe.layers.items())
        ]
        problems = _window_problems(layers, config, length)
    if problems:
        raise EngineConfigError([f"{name} cannot be served: {problem}" for problem in problems[:3]])
    return layers


def group_layers(layers: list[LayerKind]) -> tuple[LayerGroup, ...]:
    """Group the layers; groups are in the order of their first layers."""
    members: dict[tuple[int, int, int | None], list[int]] = {}
    for index, layer in enumerate(layers):
        key = (layer.shape.num_kv_heads, layer.shape.head_dim, layer.window)
        members.setdefault(key, []).append(index)
    return with_common_blocks(
        [
            LayerGroup(tuple(indices), heads, dim, window)
            for (heads, dim, window), indices in members.items()
        ]
    )


def _reasons(trait: LayerTrait) -> list[str]:
    found = [f"needs {what}" for extra, what in _UNSUPPORTED.items() if extra in trait.extras]
    if trait.mask_code is None:
        found.append("makes an attention mask of its own")
    elif not is_served(trait.mask_code):
        found.append("has an attention mask that is neither causal nor a sliding window")
    return found


def _config_problems(config: Any) -> list[str]:
    """Return problems that a probing pass cannot show.

    These are states beside the attention, and factors that change only at long contexts.
    """
    unknown = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    found = [f"its layers are of type {', '.join(sorted(unknown))}"] if unknown else []
    if getattr(config, "attn_temperature_tuning", False):
        found.append(
            "attn_temperature_tuning scales queries by positions that the model counts over the "
            "whole step"
        )
    return found


def _window_problems(layers: list[LayerKind], config: Any, length: int) -> list[str]:
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
        if kind == "sliding_attention" and layer.window is None
    ][:1]
