"""Finds what can be fused in a loaded model, builds the replacement, and keeps it only if it is
equivalent.

No family is matched by name: a module with the right children is tried, and each replacement runs
against the original on random rows before it is used. A module whose replacement differs stays as
it is. So an unusual family is slower, never wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tokenmill_worker.engines.own.cpu.fused.layer_matching import fuse_layers
from tokenmill_worker.engines.own.cpu.fused.modules import (
    FusedAttention,
    FusedMLP,
    FusedNorm,
    PackedLinear,
)
from tokenmill_worker.engines.own.cpu.fused.packing import Packing
from tokenmill_worker.engines.own.cpu.kernels.linear import Epilogue, Packer
from tokenmill_worker.engines.own.model.equivalence import call_attention, is_equivalent
from tokenmill_worker.engines.own.model.replacement import (
    Activation,
    describe_attention,
    describe_mlp,
    describe_norm,
    linear_weight,
    replace_children,
)

log = logging.getLogger(__name__)

_EPILOGUES = {Activation.SILU: Epilogue.SWIGLU, Activation.GELU_TANH: Epilogue.GEGLU_TANH}


def replace_modules(model: nn.Module, packing: Packing) -> Counter[str]:
    """Replace fitting modules in place; return the number of replacements by kind."""
    replaced: Counter[str] = Counter()
    for kind in (_attention, _mlp, _norm, _linear):

        def build(
            parent: nn.Module, name: str, module: nn.Module, kind: Any = kind
        ) -> nn.Module | None:
            if _reads_weight_of(parent, name):
                return None
            return kind(_for(packing, model, module), module)  # type: ignore[no-any-return]

        replaced += replace_children(model, build)
    replaced += fuse_layers(model)
    log.info(
        "Fused modules: %s",
        ", ".join(f"{count} {kind}" for kind, count in replaced.items()) or "none",
    )
    return replaced


def _reads_weight_of(parent: nn.Module, child: str) -> bool:
    """Return whether the parent reads the child's weight itself, as some routers do in forward.

    A replacement has no such weight. Parents whose code does not show it name it in `weights_read`.
    """
    return child in getattr(parent, "weights_read", ()) or (
        f"self.{child}.weight" in _source(type(parent).forward)
    )


@functools.cache  # layers are many, and their classes few
def _source(function: Callable[..., object]) -> str:
    """Return the function's source, or nothing if it is not available."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _for(packing: Packing, model: nn.Module, module: nn.Module) -> Packing:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return dataclasses.replace(packing, body=packing.head) if module is head else packing


def _checked(
    packing: Packing, original: nn.Module, width: int, build: Callable[[Packer], nn.Module]
) -> nn.Module | None:
    """Build a replacement and compare it in float32, then return it in the form that the model runs
    on.

    Only the form of the computation is compared, not the error of quantisation.
    """
    candidate = build(packing.exact)
    if not is_equivalent(original, candidate, width):
        return None
    return candidate if packing.is_exact else build(packing.body)


# ── what is built from what ──


def _linear(packing: Packing, module: nn.Module) -> nn.Module | None:
    weight, bias = linear_weight(module), getattr(module, "bias", None)
    if weight is None or weight.dtype != torch.float32:
        return None
    return _checked(
        packing, module, weight.shape[1], lambda packer: PackedLinear(packer, weight, bias)
    )


def _norm(packing: Packing, module: nn.Module) -> nn.Module | None:
    found = describe_norm(module)
    if found is None:
        return None
    norm = FusedNorm(packing.kernels, *found)
    return norm if is_equivalent(module, norm, found.weight.shape[0]) else None


def _mlp(packing: Packing, module: nn.Module) -> nn.Module | None:
    found = describe_mlp(module)
    if found is None:
        return None
    gate, up = found.gate_up if len(found.gate_up) == 2 else found.gate_up[0].chunk(2, dim=0)
    epilogue = _EPILOGUES[found.activation]
    if gate.shape[0] % (packing.exact.panel_width // 2):
        return None
    return _checked(
        packing,
        module,
        gate.shape[1],
        lambda packer: FusedMLP(packer, gate, up, found.down, epilogue),
    )


def _attention(packing: Packing, module: nn.Module) -> nn.Module | None:
    found = describe_attention(module)
    if found is None:
        return None
    width = found.weight.shape[1]
    call = call_attention(module, width, found.rotary_dim)
    if call is None:
        return None
    heads = (found.num_heads, found.num_kv_heads)

    def build(packer: Packer) -> FusedAttention:
        packed = (
            packer.pack(found.weight, found.bias),
            packer.pack(found.out.weight, found.out.bias),
        )
        return FusedAttention(module, *packed, heads, found.rotary_dim, call.extras)

    candidate = build(packing.exact)
    fused_call = call_attention(candidate, width, found.rotary_dim)
    if fused_call is None or not fused_call.is_equivalent_to(call):
        return None
    return candidate if packing.is_exact else build(packing.body)
