"""From what the probing pass saw to layer groups: which layers keep their KV alike.

Layers with the same window, key heads and head size share block ids and one pool. What the cache cannot
keep is refused here, in one sentence.
"""

from __future__ import annotations

from typing import Any

from worker.engine.config import EngineConfigError, LayerGroup
from worker.engine.model.paged import LayerTrait, Probe

_UNSUPPORTED = {
    "position_bias": "a bias on attention logits",
    "alibi": "a bias on attention logits",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "sinks": "sinks of its own kind",
}


def describe_layers(probe: Probe, config: Any, name: str) -> list[LayerTrait]:
    """The layers' traits by index, their windows completed from the configuration. Raises EngineConfigError."""
    num_layers = int(config.num_hidden_layers)
    problems = []
    if sorted(probe.layers) != list(range(num_layers)):
        missing = num_layers - len(probe.layers)
        problems.append(
            f"{name} cannot be served: {missing} of its {num_layers} layers do not go through Transformers' "
            "AttentionInterface"
        )
    if probe.repeated:
        problems.append(f"{name} cannot be served: layer {min(probe.repeated)} runs its attention more than once")
    for index, trait in sorted(probe.layers.items()):
        problems += [f"{name} cannot be served: layer {index} {reason}" for reason in _reasons(trait)]
    problems = problems or _window_problems(probe, config, name)
    if problems:
        raise EngineConfigError(problems[:3])
    return [_with_window(probe.layers[i], _configured_window(config, i)) for i in range(num_layers)]


def group_layers(traits: list[LayerTrait]) -> tuple[LayerGroup, ...]:
    """In the order of their first layers."""
    members: dict[tuple[int, int, int | None], list[int]] = {}
    for index, trait in enumerate(traits):
        key = (trait.shape.num_kv_heads, trait.shape.head_dim, trait.window)
        members.setdefault(key, []).append(index)
    return tuple(LayerGroup(tuple(layers), heads, dim, window) for (heads, dim, window), layers in members.items())


def _reasons(trait: LayerTrait) -> list[str]:
    found = [f"needs {what}" for extra, what in _UNSUPPORTED.items() if extra in trait.extras]
    if trait.value_dim != trait.shape.head_dim:
        found.append(f"has keys of size {trait.shape.head_dim} but values of size {trait.value_dim}")
    return found


def _window_problems(probe: Probe, config: Any, name: str) -> list[str]:
    types = set(getattr(config, "layer_types", None) or ())
    unknown = types - {"full_attention", "sliding_attention"}
    if unknown:
        return [f"{name} cannot be served: its layers are of type {', '.join(sorted(unknown))}"]
    return [
        f"{name} cannot be served: layer {index} asks for a window of {trait.window} tokens, its configuration says "
        f"{configured}"
        for index, trait in sorted(probe.layers.items())
        if (configured := _configured_window(config, index)) != trait.window and None not in (configured, trait.window)
    ]


def _configured_window(config: Any, index: int) -> int | None:
    """Some families pass no window to the attention function and would only build it into their mask."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    if types is None:
        return int(window)
    return int(window) if types[index] == "sliding_attention" else None


def _with_window(trait: LayerTrait, configured: int | None) -> LayerTrait:
    window = trait.window if trait.window is not None else configured
    return LayerTrait(trait.shape, trait.value_dim, window, trait.extras)
