"""Reads a LoRA adapter as peft writes it: a folder with a configuration and safetensors.

An adapter that changes the model in another way than `W + scaling · B A` on a linear layer is
refused, with the name of the option. Every unknown option that is set is refused too: an adapter
runs as it was trained, or not at all. `sites.py` checks whether the layers exist in the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ROOT = "base_model.model."
_FACTOR = re.compile(r"(?P<path>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")
_HARMLESS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
_NAMES = {
    "use_dora": "DoRA (use_dora)",
    "use_qalora": "QA-LoRA (use_qalora)",
    "modules_to_save": "whole trained layers (modules_to_save)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "layer_replication": "repeated layers (layer_replication)",
    "target_parameters": "adapted parameters (target_parameters)",
    "lora_bias": "biases (lora_bias)",
    "alora_invocation_tokens": "activation by tokens (alora_invocation_tokens)",
}
# other methods change the base model
_INITS = {"none", "true", "false", "gaussian", "orthogonal", "eva"}
_TENSORS = {
    "lora_embedding_": "adapted embeddings",
    "lora_magnitude_vector": "DoRA (lora_magnitude_vector)",
    "lora_B.bias": "biases (lora_bias)",
    "modules_to_save": "whole trained layers (modules_to_save)",
}


class AdapterError(ValueError):
    """The adapter cannot be used; the text is one sentence for the requester."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Factors of the term added to one layer's product: `x @ a.T @ b.T`."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank], the scaling in it


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """Contents of an adapter's files; `digest` differs between versions of an adapter."""

    digest: str
    layers: dict[str, LowRank]  # by the layer's path in the model


def stamp_of(folder: Path) -> tuple[int, ...]:
    """Return numbers that change when the files do; raises AdapterError where there are none."""
    try:
        found = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError:
        raise AdapterError(_missing(folder)) from None
    return tuple(
        number for stat in found for number in (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    )


def read_adapter(folder: Path) -> AdapterFile:
    """Read and check an adapter's files; raises AdapterError."""
    try:
        config_bytes, weights = (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()
    except OSError:
        raise AdapterError(_missing(folder)) from None
    try:
        config = json.loads(config_bytes)
    except ValueError as error:
        raise AdapterError(f"its {CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"its {CONFIG} holds no object")
    _check_config(config)
    try:
        tensors = load_tensors(weights)
    except SafetensorError as error:
        raise AdapterError(f"its {WEIGHTS} cannot be read: {error}") from None
    digest = hashlib.blake2b(config_bytes + weights, digest_size=16).hexdigest()
    return AdapterFile(digest, _layers(config, tensors))


def _missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if (folder / "adapter_model.bin").is_file():
        return (
            f"{folder} holds adapter_model.bin, a pickle, which is never read: "
            "save it as safetensors"
        )
    return f"{folder} holds no {CONFIG} with {WEIGHTS}"


def _check_config(config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"it is of type {kind!r}; only LORA adapters are served")
    init = str(config.get("init_lora_weights", True)).lower()
    unsupported = [] if init in _INITS else [f"a changed base model (init_lora_weights {init!r})"]
    if config.get("bias", "none") != "none":
        unsupported.append(f"trained biases (bias {config['bias']!r})")
    for name, value in config.items():
        if name not in _HARMLESS and value not in (None, False, {}, [], ""):
            unsupported.append(_NAMES.get(name, f"the option {name}"))
    if unsupported:
        raise AdapterError(f"it needs {' and '.join(unsupported)}, which is not supported")


def _layers(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, LowRank]:
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None or tensor.dim() != 2:
            reason = next(
                (words for sign, words in _TENSORS.items() if sign in name), f"the tensor {name}"
            )
            raise AdapterError(f"it needs {reason}, which is not supported")
        if not bool(torch.isfinite(tensor).all()):
            # they could spread to other requests' rows of the same step
            raise AdapterError(f"its tensor {name} holds values that are not finite")
        factors.setdefault(match["path"].removeprefix(_ROOT), {})[match["factor"]] = tensor
    if not factors:
        raise AdapterError("it holds no LoRA tensors")
    return {path: _low_rank(config, path, pair) for path, pair in factors.items()}


def _low_rank(config: dict[str, Any], path: str, pair: dict[str, Tensor]) -> LowRank:
    a, b = pair.get("A"), pair.get("B")
    if a is None or b is None:
        raise AdapterError(f"{path} has only one of lora_A and lora_B")
    if a.shape[0] != b.shape[1] or not a.shape[0]:
        raise AdapterError(
            f"{path} has a lora_A of rank {a.shape[0]} and a lora_B of rank {b.shape[1]}"
        )
    return LowRank(a.float(), b.float() * _scaling(config, path, a.shape[0]))


def _scaling(config: dict[str, Any], path: str, rank: int) -> float:
    alpha = config.get("lora_alpha", 8)
    # the first match counts, as in peft
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", path):
            alpha = own
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"its lora_alpha of {path} is {alpha!r}, which is no number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
