"""Finds what can be fused in a loaded model, builds the replacement, and keeps it only if it is
equivalent.

No family is matched by name: a module with the right children is tried. Each replacement runs
against the original before it is used: in float32, on a copy, so that only the form of the
computation is compared. A module whose replacement differs stays as it is. So an unusual family is
slower, never wrong.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmill_worker.engine.cuda.fused import equivalence
from tokenmill_worker.engine.cuda.fused.launches import HeadNorms, Heads
from tokenmill_worker.engine.cuda.fused.modules import (
    DeviceAttention,
    DeviceLayer,
    DeviceLayers,
    DeviceMLP,
    DeviceNorm,
)
from tokenmill_worker.engine.model.replacement import (
    Activation,
    activation_of,
    children_of,
    describe_norm,
    rotary_dim_of,
)

log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Build = Callable[[Any], nn.Module | None]
IsEquivalent = Callable[[nn.Module, nn.Module], bool]


def replace_modules(model: nn.Module) -> Counter[str]:
    """Replace fitting modules in place; return the number of replacements by kind."""
    replaced: Counter[str] = Counter()
    failed: set[str] = set()
    steps: tuple[tuple[Build, IsEquivalent], ...] = (
        (_norm, equivalence.rows_are_equivalent),
        (_mlp, equivalence.rows_are_equivalent),
        (_attention, equivalence.attention_is_equivalent),
        (_layer, equivalence.layers_are_equivalent),
    )
    for build, is_equivalent in steps:
        for parent, name, module in list(children_of(model)):
            if (weight := next(module.parameters(), None)) is None or weight.dtype not in _DTYPES:
                continue
            replacement = _checked(module, build, is_equivalent, failed)
            if replacement is not None:
                setattr(parent, name, replacement)
                replaced[type(replacement).__name__] += 1
    _join(model)
    listed = ", ".join(f"{count} {kind}" for kind, count in replaced.items()) or "none"
    log.info("fused modules on %s: %s", next(model.parameters()).device, listed)
    return replaced


def _checked(
    module: nn.Module, build: Build, is_equivalent: IsEquivalent, failed: set[str]
) -> nn.Module | None:
    """Build and check a replacement; return None where there is none or it differs.

    `failed` collects the warnings already logged, so that each is logged once.
    """
    try:
        replacement = build(module)
    except Exception as error:  # an unusual structure: this module stays as it is
        log.debug("not fused: %s: %s", type(error).__name__, error)
        return None
    if replacement is None:
        return None
    try:
        original = copy.deepcopy(module).float()
        candidate = build(original)
        if candidate is None or not is_equivalent(original, candidate):
            return None
    except Exception as error:  # an unusual signature, or a kernel that fails
        said = f"{type(module).__name__} is not fused: {type(error).__name__}: {error}"
        if said not in failed:
            failed.add(said)
            log.warning("%s", said)
        return None
    return replacement


def _join(model: nn.Module) -> None:
    """Replace each list whose layers are all of one kind by `DeviceLayers`."""
    for parent, name, stack in children_of(model):
        layers = [layer for layer in stack.children() if isinstance(layer, DeviceLayer)]
        if not isinstance(stack, nn.ModuleList) or len(layers) < max(len(stack), 2):
            continue
        config: Any = getattr(model, "config", None)
        types = (
            set(getattr(config.get_text_config(), "layer_types", None) or ())
            if config is not None
            else set()
        )
        if (
            len(types) <= 1 and len({layer.self_attn.heads for layer in layers}) == 1
        ):  # called alike
            setattr(parent, name, DeviceLayers(layers))


# ── what is built from what ──


def _norm(module: Any) -> nn.Module | None:
    found = describe_norm(module)
    if found is None:
        return None
    weight, eps = found
    # a norm that adds 1 to its weight (Gemma's) shows a nonzero output for a weight of zeros
    ones = torch.ones(1, weight.shape[0], device=weight.device, dtype=weight.dtype)
    bare = copy.copy(module)
    bare._parameters = {
        **module._parameters,
        "weight": nn.Parameter(torch.zeros_like(weight), requires_grad=False),
    }
    return DeviceNorm(weight.detach(), eps, 1.0 if bool(bare(ones).any()) else 0.0)


def _mlp(module: Any) -> nn.Module | None:
    activation = activation_of(module)
    down, both = getattr(module, "down_proj", None), getattr(module, "gate_up_proj", None)
    if activation is None or type(down) is not nn.Linear:
        return None
    parts = (
        [both]
        if both is not None
        else [getattr(module, name, None) for name in ("gate_proj", "up_proj")]
    )
    if any(type(part) is not nn.Linear or _bias(part) is not None for part in parts):
        return None
    gate_up = _joined([part.weight for part in parts])  # type: ignore[union-attr]
    return DeviceMLP(gate_up, down, activation is Activation.GELU_TANH)


def _attention(module: Any) -> nn.Module | None:
    head_dim, out = getattr(module, "head_dim", None), getattr(module, "o_proj", None)
    if (
        not isinstance(head_dim, int)
        or type(out) is not nn.Linear
        or not hasattr(module, "layer_idx")
    ):
        return None
    joint = getattr(module, "qkv_proj", None)
    parts = (
        [joint]
        if joint is not None
        else [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    )
    if any(type(part) is not nn.Linear for part in parts):
        return None
    query_size = out.in_features
    key_size = (sum(part.out_features for part in parts) - query_size) // 2  # type: ignore[union-attr]
    biases = [bias for part in parts if (bias := _bias(part)) is not None]
    if len(biases) not in (0, len(parts)):
        return None
    weight = _joined([part.weight for part in parts])  # type: ignore[union-attr]
    heads = Heads(query_size // head_dim, key_size // head_dim, head_dim, rotary_dim_of(module))
    extras = equivalence.extras_of(module, heads, weight.shape[1])
    if extras is None:
        return None
    return DeviceAttention(
        module, (weight, _joined(biases) if biases else None), heads, _head_norms(module), extras
    )


def _layer(module: Any) -> nn.Module | None:
    kinds = {
        "self_attn": DeviceAttention,
        "mlp": DeviceMLP,
        "input_layernorm": DeviceNorm,
        "post_attention_layernorm": DeviceNorm,
    }
    children = {
        name: child for name, child in module.named_children() if not isinstance(child, nn.Dropout)
    }
    if children.keys() != kinds.keys() or not all(
        isinstance(children[name], kind) for name, kind in kinds.items()
    ):
        return None
    return DeviceLayer(module)


def _head_norms(module: Any) -> HeadNorms | None:
    query, key = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    if query is None and key is None:
        return None
    if not (isinstance(query, DeviceNorm) and isinstance(key, DeviceNorm)):
        raise TypeError("head norms that are no RMS norms")
    if (query.eps, query.offset, query.weight.shape) != (key.eps, key.offset, (module.head_dim,)):
        raise TypeError("head norms that differ, or go over several heads")
    return HeadNorms(query.weight, key.weight, query.eps, query.offset)


def _bias(linear: Any) -> Tensor | None:
    return getattr(linear, "bias", None)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0].detach() if len(parts) == 1 else torch.cat([part.detach() for part in parts])
