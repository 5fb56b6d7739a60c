"""Finds what can be fused in a loaded model, builds the replacement, and keeps it only if it is
equivalent.

No family is matched by name: a module with the right children is tried, and each replacement runs
against the original on random rows before it is used. A module whose replacement differs stays as
it is. So an unusual family is slower, never wrong.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tokenmill_worker.engine.cpu.fused.layer_matching import fuse_layers
from tokenmill_worker.engine.cpu.fused.modules import (
    FusedAttention,
    FusedMLP,
    FusedNorm,
    PackedLinear,
)
from tokenmill_worker.engine.cpu.fused.packing import Packing
from tokenmill_worker.engine.cpu.kernels.linear import Epilogue, Packer
from tokenmill_worker.engine.model.equivalence import call_attention, is_equivalent
from tokenmill_worker.engine.model.replacement import (
    Activation,
    activation_of,
    children_of,
    describe_norm,
    rotary_dim_of,
)

log = logging.getLogger(__name__)

_EPILOGUES = {Activation.SILU: Epilogue.SWIGLU, Activation.GELU_TANH: Epilogue.GEGLU_TANH}


def replace_modules(model: nn.Module, packing: Packing) -> Counter[str]:
    """Replace fitting modules in place; return the number of replacements by kind."""
    replaced: Counter[str] = Counter()
    for build in (_attention, _mlp, _norm, _linear):
        for parent, name, module in list(children_of(model)):
            if _reads_weight_of(parent, name):
                continue
            replacement = build(_for(packing, model, module), module)
            if replacement is not None:
                setattr(parent, name, replacement)
                replaced[type(replacement).__name__] += 1
    replaced += fuse_layers(model)
    log.info(
        "fused modules: %s",
        ", ".join(f"{count} {kind}" for kind, count in replaced.items()) or "none",
    )
    return replaced


def _reads_weight_of(parent: nn.Module, child: str) -> bool:
    """Return whether the parent's forward reads the child's weight itself, as some routers do.

    A replacement has no such weight.
    """
    try:
        return f"self.{child}.weight" in inspect.getsource(type(parent).forward)
    except (OSError, TypeError):  # its source is not available
        return False


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
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if (
        not isinstance(module, nn.Linear | Conv1D)
        or not isinstance(weight, Tensor)
        or weight.dtype != torch.float32
    ):
        return None
    if isinstance(module, Conv1D):  # GPT-2's linear layer, stored transposed
        weight = weight.T
    return _checked(
        packing, module, weight.shape[1], lambda packer: PackedLinear(packer, weight, bias)
    )


def _norm(packing: Packing, module: nn.Module) -> nn.Module | None:
    found = describe_norm(module)
    if found is None:
        return None
    weight, eps = found
    candidates = (FusedNorm(packing.kernels, weight, eps, offset) for offset in (0.0, 1.0))
    return next((norm for norm in candidates if is_equivalent(module, norm, weight.shape[0])), None)


def _mlp(packing: Packing, module: nn.Module) -> nn.Module | None:
    activation = activation_of(module)
    down = getattr(module, "down_proj", None)
    halves = _gate_and_up(module)
    if activation is None or halves is None or not isinstance(down, nn.Linear):
        return None
    gate, up = halves
    epilogue = _EPILOGUES[activation]
    if gate.shape[0] % (packing.exact.panel_width // 2):
        return None
    return _checked(
        packing, module, gate.shape[1], lambda packer: FusedMLP(packer, gate, up, down, epilogue)
    )


def _gate_and_up(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return the weights of gate and up: from two projections, or from one that holds both halves
    (Phi).
    """
    both = getattr(module, "gate_up_proj", None)
    if isinstance(both, nn.Linear) and not _has_bias(both):
        gate, up = both.weight.chunk(2, dim=0)
        return gate, up
    gate_proj, up_proj = getattr(module, "gate_proj", None), getattr(module, "up_proj", None)
    if not isinstance(gate_proj, nn.Linear) or not isinstance(up_proj, nn.Linear):
        return None
    return (
        None if _has_bias(gate_proj) or _has_bias(up_proj) else (gate_proj.weight, up_proj.weight)
    )


def _has_bias(linear: nn.Linear) -> bool:
    bias: Tensor | None = linear.bias  # torch's annotation leaves the None out
    return bias is not None


def _attention(packing: Packing, module: nn.Module) -> nn.Module | None:
    out = getattr(module, "o_proj", None)
    projections = _qkv(module)
    head_dim = getattr(module, "head_dim", None)
    needed = all(hasattr(module, name) for name in ("layer_idx", "scaling"))
    if (
        projections is None
        or not isinstance(out, nn.Linear)
        or not isinstance(head_dim, int)
        or not needed
    ):
        return None
    weight, bias, query_size, key_size = projections
    rotary_dim = rotary_dim_of(module)
    call = call_attention(module, weight.shape[1], rotary_dim)
    if call is None:
        return None
    heads = (query_size // head_dim, key_size // head_dim)

    def build(packer: Packer) -> FusedAttention:
        packed = packer.pack(weight, bias), packer.pack(out.weight, out.bias)
        return FusedAttention(module, *packed, heads, rotary_dim, call.extras)

    candidate = build(packing.exact)
    found = call_attention(candidate, weight.shape[1], rotary_dim)
    if found is None or not found.is_equivalent_to(call):
        return None
    return candidate if packing.is_exact else build(packing.body)


def _qkv(module: nn.Module) -> tuple[Tensor, Tensor | None, int, int] | None:
    """Return the joint weight and bias, and the sizes of queries and of keys."""
    joint = getattr(module, "qkv_proj", None)
    out = getattr(module, "o_proj", None)
    if isinstance(joint, nn.Linear) and isinstance(out, nn.Linear):
        query_size = out.in_features
        return joint.weight, joint.bias, query_size, (joint.out_features - query_size) // 2
    parts = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    linears = [part for part in parts if isinstance(part, nn.Linear)]
    if len(linears) != 3 or linears[1].out_features != linears[2].out_features:
        return None
    present = [part.bias for part in linears if _has_bias(part)]
    if present and len(present) != 3:
        return None
    weight = _join([part.weight for part in linears])
    return (
        weight,
        _join(present) if present else None,
        linears[0].out_features,
        linears[1].out_features,
    )


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts))
