"""Finds the modules of a model that a device may replace, and describes what they compute.

No family is matched by name: a module with the right children and attributes fits. Each device
builds its own replacements and tests them against the originals.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor, nn


class Activation(Enum):
    """Activation of a gated MLP."""

    SILU = auto()
    GELU_TANH = auto()


class RmsNorm(NamedTuple):
    """Weight `[hidden]` and epsilon of an RMS norm."""

    weight: Tensor
    eps: float


_ACTIVATIONS = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUTanh": Activation.GELU_TANH,
    "PytorchGELUTanh": Activation.GELU_TANH,
}


def children_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return parent, name and child of every module below the model."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
    ]


def describe_norm(module: nn.Module) -> RmsNorm | None:
    """Return an RMS norm's weight and epsilon; None for any other module."""
    weight: Any = getattr(module, "weight", None)
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__:
        return None
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    return RmsNorm(weight, eps)


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation of a gated MLP, or None where no device has it fused."""
    function = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    return _ACTIVATIONS.get(type(function).__name__)


def rotary_dim_of(module: Any) -> int:
    """Return how many dimensions of each of an attention module's heads are rotated."""
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor = (
        getattr(config, "partial_rotary_factor", None) or rope.get("partial_rotary_factor") or 1.0
    )
    return int(module.head_dim * float(factor))
