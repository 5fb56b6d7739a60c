"""Attention backends by name, and the choice among them; each is imported when first requested.

The automatic choice skips a backend that is not installed or not built. An explicit choice of such
a backend fails with an error that says why.
"""

from __future__ import annotations

import logging
from importlib import import_module

import torch

from tokenmill_worker.engines.own.attention.base import AttentionBackend, AttentionShape
from tokenmill_worker.engines.own.config import AttentionName, EngineConfigError

log = logging.getLogger(__name__)

_MODULES: dict[str, tuple[str, str]] = {
    "reference": ("tokenmill_worker.engines.own.attention.reference", "ReferenceAttention"),
    "cpu": ("tokenmill_worker.engines.own.cpu.attention", "CpuAttention"),
    "triton": ("tokenmill_worker.engines.own.cuda.attention.triton", "TritonAttention"),
    "flash": ("tokenmill_worker.engines.own.cuda.attention.flash", "FlashAttention"),
}
# Measured ones first: no version of flash-attn has run here yet.
_PREFERRED = {"cpu": ("cpu", "reference"), "cuda": ("triton", "flash", "reference")}


def backend_names() -> tuple[str, ...]:
    return tuple(_MODULES)


def backend_class(name: str) -> type[AttentionBackend]:
    """Import a backend's class; raises ImportError, in one sentence, where a need is missing."""
    module_name, class_name = _MODULES[name]
    found: type[AttentionBackend] = getattr(import_module(module_name), class_name)
    return found


def why_not(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    shapes: list[AttentionShape],
    block_size: int,
) -> str | None:
    """Return why this backend cannot serve all these layers, in one sentence; None if it can.

    A `block_size` of 0 is the backend's default.
    """
    try:
        backend = backend_class(name)
    except ImportError as error:
        return f"it cannot be imported ({error})"
    size = backend.block_size_of(block_size, device)
    reasons = (backend.why_not(device, dtype, shape, size) for shape in dict.fromkeys(shapes))
    return next((reason for reason in reasons if reason is not None), None)


def serving_backend(
    name: AttentionName,
    device: torch.device,
    dtype: torch.dtype,
    shapes: list[AttentionShape],
    block_size: int,
) -> tuple[str | None, list[str]]:
    """Return the name of the backend that `choose` returns, or None, and why earlier ones are not
    used.
    """
    candidates = _PREFERRED.get(device.type, ("reference",)) if name == "auto" else (name,)
    refused: list[str] = []
    for candidate in candidates:
        reason = why_not(candidate, device, dtype, shapes, block_size)
        if reason is None:
            return candidate, refused
        refused.append(f"attention backend {candidate!r} cannot be used: {reason}")
    return None, refused


def choose(
    name: AttentionName,
    device: torch.device,
    dtype: torch.dtype,
    shapes: list[AttentionShape],
    block_size: int,
    amx: bool = True,
) -> AttentionBackend:
    """Return the named backend, or with "auto" the first one that can serve every layer.

    A `block_size` of 0 is the backend's default. `amx` allows the backend to use the CPU's matrix
    registers. Raises EngineConfigError with the reasons if no backend fits.
    """
    found, refused = serving_backend(name, device, dtype, shapes, block_size)
    if found is None:
        raise EngineConfigError(refused)
    backend = backend_class(found)()
    backend.uses_amx = amx
    if refused:
        log.info("Attention %r is used: %s", found, "; ".join(refused))
    return backend
