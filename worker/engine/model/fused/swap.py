"""Finds what can be fused in a loaded model, builds the stand-in, and keeps it only if it agrees.

Nothing is matched by a family's name: a module with the right children is tried, and each stand-in is
run against the original on random rows before it takes its place. What does not agree stays as it is,
so a family with a twist of its own is slower, never wrong.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from worker.engine.kernels.linear import Epilogue, LinearKernels
from worker.engine.kernels.toolchain import KernelUnavailableError
from worker.engine.model.fused.agreement import agree, call_attention
from worker.engine.model.fused.modules import FusedAttention, FusedMLP, FusedNorm, PackedLinear

log = logging.getLogger(__name__)

_ACTIVATIONS = {
    "SiLU": Epilogue.SWIGLU,
    "SiLUActivation": Epilogue.SWIGLU,
    "GELUTanh": Epilogue.GEGLU_TANH,
    "PytorchGELUTanh": Epilogue.GEGLU_TANH,
}


def swap_modules(model: nn.Module, load: Callable[[], LinearKernels] = LinearKernels) -> Counter[str]:
    """Swap in place what fits; the count of stand-ins by kind. Nothing where no compiler is at hand."""
    try:
        kernels = load()
    except KernelUnavailableError as error:
        log.warning("the model runs on torch's own linear layers: %s", error)
        return Counter()
    swapped: Counter[str] = Counter()
    for build in (_attention, _mlp, _norm, _linear):
        for parent, name, module in list(_children(model)):
            stand_in = build(kernels, module)
            if stand_in is not None:
                setattr(parent, name, stand_in)
                swapped[type(stand_in).__name__] += 1
    log.info("fused modules: %s", dict(swapped))
    return swapped


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]


# ── what is built from what ──


def _linear(kernels: LinearKernels, module: nn.Module) -> nn.Module | None:
    if not isinstance(module, nn.Linear) or module.weight.dtype != torch.float32:
        return None
    return _if_equal(module, PackedLinear(kernels, module), module.in_features)


def _norm(kernels: LinearKernels, module: nn.Module) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    candidates = (FusedNorm(kernels, weight, eps, offset) for offset in (0.0, 1.0))
    return next((norm for norm in candidates if agree(module, norm, weight.shape[0])), None)


def _mlp(kernels: LinearKernels, module: nn.Module) -> nn.Module | None:
    epilogue = _ACTIVATIONS.get(type(getattr(module, "act_fn", getattr(module, "activation_fn", None))).__name__)
    down = getattr(module, "down_proj", None)
    halves = _gate_and_up(module)
    if epilogue is None or halves is None or not isinstance(down, nn.Linear):
        return None
    gate, up = halves
    if gate.shape[0] % (kernels.panel_width // 2):
        return None
    return _if_equal(module, FusedMLP(kernels, gate, up, down, epilogue), gate.shape[1])


def _gate_and_up(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Two projections, or one that holds both halves (Phi)."""
    both = getattr(module, "gate_up_proj", None)
    if isinstance(both, nn.Linear) and not _has_bias(both):
        gate, up = both.weight.chunk(2, dim=0)
        return gate, up
    gate_proj, up_proj = getattr(module, "gate_proj", None), getattr(module, "up_proj", None)
    if not isinstance(gate_proj, nn.Linear) or not isinstance(up_proj, nn.Linear):
        return None
    return None if _has_bias(gate_proj) or _has_bias(up_proj) else (gate_proj.weight, up_proj.weight)


def _has_bias(linear: nn.Linear) -> bool:
    bias: Tensor | None = linear.bias  # torch's annotation leaves the None out
    return bias is not None


def _attention(kernels: LinearKernels, module: nn.Module) -> nn.Module | None:
    out = getattr(module, "o_proj", None)
    projections = _qkv(module)
    head_dim = getattr(module, "head_dim", None)
    needed = all(hasattr(module, name) for name in ("layer_idx", "scaling"))
    if projections is None or not isinstance(out, nn.Linear) or not isinstance(head_dim, int) or not needed:
        return None
    weight, bias, query_size, key_size = projections
    rotary_dim = _rotary_dim(module)
    call = call_attention(module, weight.shape[1], rotary_dim)
    if call is None:
        return None
    candidate = FusedAttention(
        module,
        kernels.pack(weight, bias),
        kernels.pack(out.weight, out.bias),
        (query_size // head_dim, key_size // head_dim),
        call.extras,
    )
    found = call_attention(candidate, weight.shape[1], rotary_dim)
    return candidate if found is not None and found.agrees_with(call) else None


def _qkv(module: nn.Module) -> tuple[Tensor, Tensor | None, int, int] | None:
    """The joint weight and bias, and the sizes of queries and of keys."""
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
    return weight, _join(present) if present else None, linears[0].out_features, linears[1].out_features


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts))


def _rotary_dim(module: nn.Module) -> int:
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor = getattr(config, "partial_rotary_factor", None) or (rope.get("partial_rotary_factor") or 1.0)
    head_dim: int = module.head_dim  # type: ignore[assignment]
    return int(head_dim * factor)


def _if_equal(original: nn.Module, candidate: nn.Module, width: int) -> nn.Module | None:
    return candidate if agree(original, candidate, width) else None
