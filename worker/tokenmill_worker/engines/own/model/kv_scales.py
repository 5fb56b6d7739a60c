"""Scales of keys and values in 8 bits: the checkpoint's, or calculated at the start.

A checkpoint holds them as `k_scale` and `v_scale` of each attention layer (compressed-tensors,
llm-compressor, ModelOpt), one number or one per head. Calculated ones are powers of two, one per
head, from the largest keys and values of a few prompts of random tokens. A power of two leaves the
rounding of most numbers as it is; it moves what is too large or too small into range. Workers
whose sums differ in the last bits calculate the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from tokenmill_worker.engines.own.attention import AttentionShape, KVScales
from tokenmill_worker.engines.own.attention.reference import ReferenceAttention
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.model import own_attention, verify
from tokenmill_worker.engines.own.model.layer_groups import Layers, group_layers, shapes_of
from tokenmill_worker.engines.own.model.paged_attention import PagedStep
from tokenmill_worker.engines.own.model.recurrent_states import RunLayer, StatePool

log = logging.getLogger(__name__)

_TOKENS = 512  # of each prompt that scales are calculated from
_SEEDS = (21, 22, 23, 24)
# the largest number of a head is stored as at most a half of the largest of 8 bits, for others
# than the prompts' may be larger
_HEADROOM = 2.0
_BLOCK_SIZE = 16
# names that vLLM reads: of the layer, of its projections, one for both
_NAME = re.compile(r"\.(\d+)\.(?:.*\.)?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$")


def scales_of(
    model: Any,
    forward: verify.Forward,
    layers: Layers,
    path: Path,
    config: EngineConfig,
    max_length: int,
) -> dict[int, KVScales]:
    """Return the scales of each layer that attends, by index; none where keys and values are not in
    8 bits or have no scales.

    Args:
        model: the model, on its device.
        forward: runs it in a step.
        layers: its layers.
        path: its folder.
        config: the engine's settings.
        max_length: the longest sequence that the model takes.

    Raises:
        EngineConfigError: 8 bits do not hold the model's keys, or scales of the checkpoint cannot
            be used.
    """
    if not config.has_narrow_kv:
        return {}
    if own_attention.has_biases(model):
        raise EngineConfigError([
            f"{config.model} cannot be served with kv_dtype {config.kv_dtype}: its keys carry "
            "ALiBi's biases, which 8 bits do not hold"
        ])  # fmt: skip
    shapes = shapes_of(layers)
    device = next(model.parameters()).device
    if config.calculate_kv_scales:
        largest = torch.finfo(getattr(torch, config.kv_dtype)).max
        found = _calculated(model, forward, layers, min(_TOKENS, max_length), largest)
    else:
        found = _stored(path, shapes, config.model)
    if not found:
        return {}
    scales = {
        layer: KVScales(key.to(device), value.to(device)) for layer, (key, value) in found.items()
    }
    log.info(
        "Keys and values in 8 bits have the scales %s: %s of keys, %s of values",
        "calculated now" if config.calculate_kv_scales else "of the checkpoint",
        _span([scale.key for scale in scales.values()]),
        _span([scale.value for scale in scales.values()]),
    )
    return scales


def are_stored(path: Path, config: EngineConfig) -> bool:
    """Return whether `scales_of` takes scales of the checkpoint."""
    if not config.has_narrow_kv or config.calculate_kv_scales:
        return False
    return bool(_tensors(path))


def _span(scales: list[Tensor]) -> str:
    together = torch.cat(scales)
    return f"{float(together.min()):.3g} to {float(together.max()):.3g}"


# ── from the checkpoint ──


def _stored(
    path: Path, shapes: Mapping[int, AttentionShape], name: str
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the checkpoint's scales by layer; none where it has none. A missing one is 1."""
    found = _tensors(path)
    if not found:
        return {}
    ones = torch.ones(1)
    return {
        layer: (
            _checked(found.get((layer, "k"), ones), shape, f"k_scale of layer {layer}", name),
            _checked(found.get((layer, "v"), ones), shape, f"v_scale of layer {layer}", name),
        )
        for layer, shape in shapes.items()
    }


def _tensors(path: Path) -> dict[tuple[int, str], Tensor]:
    """Return the scales of a checkpoint by layer and side, k or v."""
    found: dict[tuple[int, str], Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            matches = [match for name in list(tensors.keys()) if (match := _NAME.search(name))]
            for match in matches:
                for side in match[2] or match[3]:
                    found[int(match[1]), side] = tensors.get_tensor(match.string)
    return found


def _checked(scale: Tensor, shape: AttentionShape, what: str, name: str) -> Tensor:
    """Return float32 `[num_kv_heads]`; raises EngineConfigError."""
    flat = scale.float().flatten()
    heads = shape.num_kv_heads
    if flat.numel() not in (1, heads):
        reason = f"it has {flat.numel()} numbers: one, or one of each of {heads} heads, is read"
    elif not bool((flat.isfinite() & (flat > 0)).all()):
        reason = f"it is {flat.tolist()}"
    else:
        return flat.expand(heads).contiguous()
    raise EngineConfigError(
        [f"{name} has no usable {what} for keys and values in 8 bits: {reason}"]
    )


# ── calculated ──


@dataclass(frozen=True, slots=True)
class _RecordingStep:
    """A step that keeps the largest absolute key and value of each layer and head."""

    step: PagedStep
    # of keys and of values, by layer: float32 [num_kv_heads]
    largest: tuple[dict[int, Tensor], dict[int, Tensor]]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        extras: dict[str, Any],
    ) -> Tensor:
        layer: Any = module.layer_idx
        for kept, states in zip(self.largest, (key, value), strict=True):
            kept[layer] = torch.maximum(kept[layer], states.abs().amax(dim=(0, 2)).float())
        return self.step.attend(module, query, key, value, scale, extras)

    def recur(self, layer: int, run: RunLayer, hidden: Tensor) -> Tensor:
        return self.step.recur(layer, run, hidden)


@torch.inference_mode()
def _calculated(
    model: Any,
    forward: verify.Forward,
    layers: Layers,
    length: int,
    largest_stored: float,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return each layer's scales of keys and of values, float32 `[num_kv_heads]`."""
    device = next(model.parameters()).device
    zeros = {
        layer: torch.zeros(shape.num_kv_heads, device=device)
        for layer, shape in shapes_of(layers).items()
    }
    keys, values = zeros, dict(zeros)
    backend, num_blocks = ReferenceAttention(), -(-length // _BLOCK_SIZE)
    chunks = [verify.PromptChunk(0, 0, length, "a prompt")]
    metadata = [
        verify.metadata_of(chunks, group.window, num_blocks, _BLOCK_SIZE, device)
        for group in group_layers(layers)
    ]
    bindings = verify.with_empty_caches(layers, backend, 1 + num_blocks, _BLOCK_SIZE, device)
    states = StatePool(1, device)
    positions = torch.arange(length, device=device)
    for seed in _SEEDS:
        (tokens,) = verify.random_prompts(model, [length], seed)
        recurrence = states.step([0], [length], [length])
        paged = PagedStep(backend, bindings, metadata, recurrence=recurrence)
        forward(tokens, positions, positions[-1:], _RecordingStep(paged, (keys, values)))
    return {
        layer: (
            _power_of_two(key / largest_stored),
            _power_of_two(values[layer] / largest_stored),
        )
        for layer, key in keys.items()
    }


def _power_of_two(scales: Tensor) -> Tensor:
    """Return powers of two that are at least the scales times `_HEADROOM`; 1 for a scale of 0."""
    exponents = (scales * _HEADROOM).log2().ceil()
    return torch.where(scales > 0, exponents.exp2(), 1.0)
