"""Finds the modules of a model that a device may replace, and describes what they compute.

No family is matched by name: a module with the right children and attributes fits. Each device
builds its own replacements and tests them against the originals.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

log = logging.getLogger(__name__)

# (parent, the child's name in it, child) → what replaces the child; None: it stays
Build = Callable[[nn.Module, str, nn.Module], nn.Module | None]


class Activation(Enum):
    """Activation of a gated MLP."""

    SILU = auto()
    GELU_TANH = auto()


class RmsNorm(NamedTuple):
    """An RMS norm: weight `[hidden]`, epsilon, and what is added to the weight (1 in Gemma's)."""

    weight: Tensor
    eps: float
    offset: float


class GatedMLP(NamedTuple):
    """`down(activation(gate(x)) · up(x))`, gate and up without bias."""

    gate_up: tuple[Tensor, ...]  # weights of gate and up, or one that holds both halves (Phi)
    down: nn.Linear
    activation: Activation


class AttentionParts(NamedTuple):
    """A decoder's attention: queries, keys and values in one product, heads of one size."""

    weight: Tensor  # [query + 2 · key, hidden]
    bias: Tensor | None
    out: nn.Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int


_ACTIVATIONS = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUTanh": Activation.GELU_TANH,
    "PytorchGELUTanh": Activation.GELU_TANH,
}


class LayersAsOne(nn.ModuleList):
    """A model's decoder layers; Transformers runs `layers[:n]` and gets all of them as `whole`."""

    def __init__(self, layers: Sequence[nn.Module], whole: nn.Module) -> None:
        super().__init__(layers)
        self._whole = (whole,)  # in a tuple: its layers are children of this list already

    @property
    def whole(self) -> nn.Module:
        return self._whole[0]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self._whole
        return super().__getitem__(index)


def has_one_layer_type(model: nn.Module) -> bool:
    """Return whether the configuration tells no layers apart, which may get other arguments."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return len(set(getattr(config, "layer_types", None) or ())) <= 1


def replace_children(model: nn.Module, build: Build) -> Counter[str]:
    """Offer each module below the model to `build` and put its replacement in place.

    A replaced module is freed at once, so at most one of them is in memory beside its replacement.

    Returns:
        The number of replacements by class.
    """
    replaced: Counter[str] = Counter()
    _replace_below(model, build, replaced, WeakSet())
    return replaced


def _replace_below(
    parent: nn.Module, build: Build, replaced: Counter[str], seen: WeakSet[nn.Module]
) -> None:
    """Replace the children of `parent`; those that stay are parents in turn, each of them once."""
    seen.add(parent)
    for name in [name for name, _child in parent.named_children()]:
        replacement = build(parent, name, parent.get_submodule(name))
        if replacement is not None:
            setattr(parent, name, replacement)
            replaced[type(replacement).__name__] += 1
        elif parent.get_submodule(name) not in seen:
            _replace_below(parent.get_submodule(name), build, replaced, seen)


def linear_weight(module: nn.Module) -> Tensor | None:
    """Return the weight of a linear layer, `[outputs, inputs]`; None for any other module. GPT-2's
    Conv1D stores it transposed.
    """
    weight: Any = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear | Conv1D) or not isinstance(weight, Tensor):
        return None
    return weight if isinstance(module, nn.Linear) else weight.T


def describe_norm(module: nn.Module) -> RmsNorm | None:
    """Describe an RMS norm; return None for any other module."""
    weight: Any = getattr(module, "weight", None)
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__:
        return None
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    # a norm that adds 1 to its weight returns something else than 0 for a weight of zeros
    ones = torch.ones(1, weight.shape[0], device=weight.device, dtype=weight.dtype)
    bare = copy.copy(module)
    bare._parameters = {
        **module._parameters,
        "weight": nn.Parameter(torch.zeros_like(weight), requires_grad=False),
    }
    try:
        return RmsNorm(weight, eps, 1.0 if bool(bare(ones).any()) else 0.0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an unusual signature: this module stays as it is
        log.debug("A module is not fused: %s", error)
        return None


def describe_mlp(module: nn.Module) -> GatedMLP | None:
    """Describe a gated MLP whose activation a device has fused; return None for others."""
    activation, (down,) = activation_of(module), _linears(module, "down_proj")
    both = _linears(module, "gate_up_proj")
    parts = both if both[0] is not None else _linears(module, "gate_proj", "up_proj")
    if activation is None or down is None:
        return None
    weights = tuple(part.weight for part in parts if part is not None and _bias(part) is None)
    return GatedMLP(weights, down, activation) if len(weights) == len(parts) else None


def describe_attention(module: nn.Module) -> AttentionParts | None:
    """Describe an attention module with usual projections; return None for others."""
    head_dim, (out,) = getattr(module, "head_dim", None), _linears(module, "o_proj")
    joint = _linears(module, "qkv_proj")
    found = joint if joint[0] is not None else _linears(module, "q_proj", "k_proj", "v_proj")
    parts = [part for part in found if part is not None]
    if not isinstance(head_dim, int) or out is None or len(parts) < len(found):
        return None
    if not (hasattr(module, "layer_idx") and hasattr(module, "scaling")):
        return None
    sizes = [part.out_features for part in parts]
    query = out.in_features
    key = (sum(sizes) - query) // 2
    biases = [bias for part in parts if (bias := _bias(part)) is not None]
    if len(biases) not in (0, len(parts)) or sizes not in ([query + 2 * key], [query, key, key]):
        return None
    return AttentionParts(
        join([part.weight for part in parts]),
        join(biases) if biases else None,
        out,
        query // head_dim,
        key // head_dim,
        head_dim,
        rotary_dim_of(module),
    )


def join(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts as one tensor; a single part is not copied."""
    return parts[0].detach() if len(parts) == 1 else torch.cat([part.detach() for part in parts])


def _linears(module: nn.Module, *names: str) -> tuple[nn.Linear | None, ...]:
    found = (getattr(module, name, None) for name in names)
    return tuple(child if type(child) is nn.Linear else None for child in found)


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation of a gated MLP, or None where no device has it fused."""
    function = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    return _ACTIVATIONS.get(type(function).__name__)


def _bias(linear: nn.Linear) -> Tensor | None:
    return linear.bias  # torch's annotation leaves the None out


def rotary_dim_of(module: Any) -> int:
    """Return how many dimensions of each of an attention module's heads are rotated."""
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor = (
        getattr(config, "partial_rotary_factor", None) or rope.get("partial_rotary_factor") or 1.0
    )
    return int(module.head_dim * float(factor))
