"""Shortens a model to its first layers, and converts it to float32, during a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tokenmill_worker.engines.own.model.layer_groups import Layers

# share of a row's largest distance from its mean; float32 sums reordered differ by about 1e-5
TOLERANCE = 1e-3
_MAX_WEIGHTS = 4_000_000  # beyond this, a model is compared by its first layers
_MIN_DEPTH = 2  # first layers that are compared at least
_MAX_FLOAT32_WEIGHTS = 3_000_000_000  # beyond this, the model is compared in its own type
_NARROW_TOLERANCE = 0.1  # in 16 bits, where float32 would take too much memory


@contextmanager
def first_layers(model: Any, layers: Layers) -> Iterator[int]:
    """Keep the first layers within the context, down to one of each kind (a tiny model: all); yield
    their number.
    """
    stack = (
        _stack(model, len(layers))
        if sum(p.numel() for p in model.parameters()) > _MAX_WEIGHTS
        else None
    )
    if stack is None:
        yield len(layers)
        return
    parent, name, whole = stack
    kinds = [
        (kind, *map(_described, layer.modules())) for kind, layer in zip(layers, whole, strict=True)
    ]
    depth = min(len(whole), max(_MIN_DEPTH, *(1 + kinds.index(kind) for kind in kinds)))
    setattr(parent, name, whole[:depth])
    try:
        yield depth
    finally:
        setattr(parent, name, whole)


def _described(module: nn.Module) -> tuple[type, frozenset[tuple[str, bool | str]]]:
    """Return the module's class and flags, such as whether its layer rotates; some families keep
    flags as 0 and 1.
    """
    flags = {name: value for name, value in vars(module).items() if isinstance(value, bool | str)}
    flags |= {
        name: bool(value)
        for name, value in vars(module).items()
        if type(value) is int and value in (0, 1)
    }
    flags.pop("layer_idx", None)
    return type(module), frozenset(flags.items())


def _stack(model: nn.Module, num_layers: int) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """Return the list whose i-th member holds the i-th attention: its parent, its name and
    itself.
    """
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers and all(
                any(getattr(part, "layer_idx", None) == index for part in layer.modules())
                for index, layer in enumerate(child)
            ):  # fmt: skip
                return parent, name, child
    return None


@contextmanager
def in_float32(model: nn.Module) -> Iterator[float]:
    """Convert the model to float32 within the context, if memory allows; yield the tolerance that
    then applies.
    """
    tensors = [
        t
        for t in (*model.parameters(), *model.buffers())
        if t.is_floating_point() and t.dtype != torch.float32
    ]
    if sum(tensor.numel() for tensor in tensors) > _MAX_FLOAT32_WEIGHTS:
        yield _NARROW_TOLERANCE
        return
    kept = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield TOLERANCE
    finally:
        for tensor, data in kept:
            tensor.data = data
