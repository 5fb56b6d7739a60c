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
from torch import nn

from tokenmill_worker.engines.own.cuda.fused import equivalence
from tokenmill_worker.engines.own.cuda.fused.launches import HeadNorms, Heads
from tokenmill_worker.engines.own.cuda.fused.modules import (
    DeviceAttention,
    DeviceLayer,
    DeviceMLP,
    DeviceNorm,
    DeviceStack,
)
from tokenmill_worker.engines.own.model.replacement import (
    Activation,
    LayersAsOne,
    describe_attention,
    describe_mlp,
    describe_norm,
    has_one_layer_type,
    join,
    replace_children,
)

log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

BuildFused = Callable[[Any], nn.Module | None]
IsEquivalent = Callable[[nn.Module, nn.Module], bool]


def replace_modules(model: nn.Module) -> Counter[str]:
    """Replace fitting modules in place; return the number of replacements by kind."""
    replaced: Counter[str] = Counter()
    failed: set[str] = set()
    steps: tuple[tuple[BuildFused, IsEquivalent], ...] = (
        (_norm, equivalence.rows_are_equivalent),
        (_mlp, equivalence.rows_are_equivalent),
        (_attention, equivalence.attention_is_equivalent),
        (_layer, equivalence.layers_are_equivalent),
    )
    for step in steps:

        def build(
            _parent: nn.Module, _name: str, module: nn.Module, step: Any = step
        ) -> nn.Module | None:
            weight = next(module.parameters(), None)
            if weight is None or weight.dtype not in _DTYPES:
                return None
            return _checked(module, step[0], step[1], failed)

        replaced += replace_children(model, build)
    replace_children(model, lambda _parent, _name, module: _joined_layers(model, module))
    listed = ", ".join(f"{count} {kind}" for kind, count in replaced.items()) or "none"
    log.info("Fused modules on %s: %s", next(model.parameters()).device, listed)
    return replaced


def _checked(
    module: nn.Module, build: BuildFused, is_equivalent: IsEquivalent, failed: set[str]
) -> nn.Module | None:
    """Build and check a replacement; return None where there is none or it differs.

    Of a module in 16 bits, the replacement is built again after the check, so that it is not in
    memory beside the copies in float32. `failed` collects the warnings already logged, so that each
    is logged once. Raises torch.OutOfMemoryError: the model does not fit, fused or not.
    """
    try:
        candidate = build(module)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an unusual structure: this module stays as it is
        log.debug("A module is not fused: %s: %s", type(error).__name__, error)
        return None
    if candidate is None:
        return None
    is_exact = all(tensor.dtype == torch.float32 for tensor in module.parameters())
    try:
        original = module
        if not is_exact:
            candidate = None
            original = _in_float32(module)
            candidate = build(original)
        if candidate is None or not is_equivalent(original, candidate):
            return None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an unusual signature, or a kernel that fails
        said = f"{type(module).__name__} is not fused: {type(error).__name__}: {error}"
        if said not in failed:
            failed.add(said)
            log.warning("%s", said)
        return None
    del original
    if is_exact:
        return candidate
    candidate = None
    return build(module)


def _in_float32(module: nn.Module) -> nn.Module:
    """Return a copy of the module in float32, made without a copy in its own type."""
    copies: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach().float(), requires_grad=False)
        for weight in module.parameters()
    }
    return copy.deepcopy(module, copies).float()


def _joined_layers(model: nn.Module, stack: nn.Module) -> nn.Module | None:
    """Return a list that runs as one, if its layers are all replaced and called alike."""
    layers = [layer for layer in stack.children() if isinstance(layer, DeviceLayer)]
    if not isinstance(stack, nn.ModuleList) or len(layers) < max(len(stack), 2):
        return None
    are_alike = has_one_layer_type(model) and len({one.self_attn.heads for one in layers}) == 1
    return LayersAsOne(layers, DeviceStack(layers)) if are_alike else None


# ── what is built from what ──


def _norm(module: Any) -> nn.Module | None:
    found = describe_norm(module)
    return None if found is None else DeviceNorm(found.weight.detach(), found.eps, found.offset)


def _mlp(module: Any) -> nn.Module | None:
    found = describe_mlp(module)
    if found is None:
        return None
    return DeviceMLP(join(found.gate_up), found.down, found.activation is Activation.GELU_TANH)


def _attention(module: Any) -> nn.Module | None:
    found = describe_attention(module)
    if found is None:
        return None
    heads = Heads(found.num_heads, found.num_kv_heads, found.head_dim, found.rotary_dim)
    extras = equivalence.extras_of(module, heads, found.weight.shape[1])
    if extras is None:
        return None
    return DeviceAttention(module, (found.weight, found.bias), heads, _head_norms(module), extras)


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
