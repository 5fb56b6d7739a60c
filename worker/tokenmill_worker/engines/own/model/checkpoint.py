"""Reads a checkpoint as Transformers builds it, quantised ones by Transformers' quantisers.

A checkpoint that Transformers would read wrongly or in part is refused with one sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as progress_bars

from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.device import Device
from tokenmill_worker.engines.own.model import probe
from tokenmill_worker.engines.own.types import ProgressCallback

REPORT_S = 2.0  # between reports of progress, while weights are read
_WEIGHTS = "Loading weights"  # Transformers' description of that loop
_NAMED = 3  # missing weights in an error


def read_checkpoint(
    path: Path,
    config: EngineConfig,
    device: Device,
    dtype: torch.dtype,
    report: ProgressCallback,
    quantization: dict[str, Any] | None,
) -> Any:
    """Return the model on its device.

    Args:
        path: the model's folder.
        config: the engine's settings.
        device: where the model will be.
        dtype: of weights that are not quantised.
        report: told of the share of the weights that is read.
        quantization: `quantization_config` of the model's configuration; None: not quantised.

    Raises:
        EngineConfigError: Transformers cannot read the checkpoint, or not all of it.
    """
    if quantization is not None:
        _refuse_unknown(quantization, config.model)
    refused: tuple[type[Exception], ...] = (ValueError, TypeError, AttributeError, KeyError)
    if quantization is not None:  # a package or a device that the quantiser needs
        refused = (*refused, ImportError, RuntimeError)
    progress_bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with _reported(lambda share: report(f"loading {config.model}", share)):
            read: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=probe.OWN, output_loading_info=True,
                trust_remote_code=config.trust_remote_code,
            )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except refused as error:
        raise EngineConfigError([_refusal(error, quantization, config.model)]) from error
    model, found = read
    if missing := sorted(found["missing_keys"]):
        named = ", ".join(missing[:_NAMED]) + (", …" if missing[_NAMED:] else "")
        raise EngineConfigError(
            [f"{config.model} cannot be served: its files lack {len(missing)} weights ({named})"]
        )
    return model.to(device.torch_device)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of a model's configuration as a dictionary, or None."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(), "quantization_config", None)
    return found if found is None or isinstance(found, dict) else found.to_dict()


def _refuse_unknown(quantization: dict[str, Any], name: str) -> None:
    """Refuse a method that Transformers does not know: it would read the weights as plain ones."""
    try:
        is_known = AutoHfQuantizer.supports_quant_method(quantization)  # type: ignore[no-untyped-call]
    except ValueError:
        is_known = False
    if not is_known:
        raise EngineConfigError([
            f"{name} cannot be served: its weights are quantised "
            f"({quantization.get('quant_method') or 'no quant_method'}), which Transformers "
            f"{transformers.__version__} does not read"
        ])  # fmt: skip


def _refusal(error: Exception, quantization: dict[str, Any] | None, name: str) -> str:
    first = str(error).strip().splitlines()[0][:200] if str(error).strip() else ""
    if first.startswith("Unrecognized configuration class"):
        first = "Transformers has no causal language model for this configuration"
    if quantization is None:
        return f"{name} cannot be loaded as a causal language model: {first}"
    method = quantization.get("quant_method")
    return f"{name} cannot be loaded, its weights are quantised ({method}): {first}"


@contextmanager
def _reported(report: Callable[[float], None]) -> Iterator[None]:
    """Report the share of the weights that Transformers has read, in the context."""

    def watched(factory: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if named.get("desc") != _WEIGHTS or not arguments:
            return factory(*arguments, **named)
        return _counted(arguments[0], report)

    hook = getattr(progress_bars, "set_tqdm_hook", None)  # older versions have none
    if hook is None:
        yield
        return
    before = hook(watched)
    try:
        yield
    finally:
        hook(before)


def _counted(items: Any, report: Callable[[float], None]) -> Iterator[Any]:
    reported = time.monotonic()
    for index, item in enumerate(items):
        yield item
        if time.monotonic() - reported >= REPORT_S:
            report((index + 1) / len(items))
            reported = time.monotonic()
