"""Prepares a freshly loaded model for its first pass, by the engine's settings."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError, Quantization
from tokenmill_worker.engines.own.cpu.fused.packing import Packing
from tokenmill_worker.engines.own.cpu.fused.replace import replace_modules
from tokenmill_worker.engines.own.cpu.kernels.linear import PackedWeight
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError
from tokenmill_worker.engines.own.device import cannot_quantize

log = logging.getLogger(__name__)


def prepare_weights(
    model: nn.Module,
    config: EngineConfig,
    choose: Callable[[Quantization | None, bool, bool], Packing] = Packing.choose,
) -> nn.Module:
    """Replace the model's modules in place where the settings and the device allow it.

    Raises EngineConfigError where a requested quantisation is not possible.
    """
    weight = next(model.parameters())
    usable = (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and config.quantization != "fp8"
    )
    if config.quantization is None and not (config.fuse and usable):
        return model
    if not usable:
        raise cannot_quantize(config, weight)
    try:
        packing = choose(config.quantization, config.narrow_weights, config.amx)
    except KernelUnavailableError as error:
        if config.quantization is not None:
            raise EngineConfigError(
                [f"quantization {config.quantization!r} needs compiled kernels: {error}"]
            ) from None
        log.warning("The model runs on torch's own linear layers, which is slower: %s", error)
        return model
    replaced = replace_modules(model, packing)
    if packing.kernels.has_amx:
        log.info("Products of many rows run in the CPU's matrix registers (AMX)")
    if config.quantization is None:
        forms = ", ".join(
            f"{count / 1e6:.1f} million as {form}" for form, count in _forms(model).items()
        )
        log.info("Weights in memory, each the same bits as in float32: %s", forms or "none packed")
    else:
        _report_the_rest(model, config, replaced)
    return model


def _forms(model: nn.Module) -> Counter[str]:
    """Count packed weights by their storage format."""
    found: Counter[str] = Counter()
    for module in model.modules():
        for part in vars(module).values():
            if isinstance(part, PackedWeight):
                found[part.form] += part.n * part.k
    return found


def _report_the_rest(model: nn.Module, config: EngineConfig, replaced: Counter[str]) -> None:
    """Log the weights that stay float32 because no replacement took them; raises EngineConfigError
    if all do.
    """
    if not replaced["FusedAttention"] + replaced["FusedMLP"] + replaced["PackedLinear"]:
        raise EngineConfigError([f"no layer of {config.model} can be quantised"])
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    rest = [
        weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in embeddings
    ]
    if rest:
        count = sum(weight.numel() for weight in rest)
        log.warning(
            "%d weights (%.1f million values) are not quantised and stay float32",
            len(rest),
            count / 1e6,
        )
