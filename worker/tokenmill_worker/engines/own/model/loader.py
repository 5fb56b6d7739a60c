"""Loads a causal language model of Transformers and finds out what the engine needs about it.

The configuration of each family is not interpreted. Instead, one probing pass records how each
layer calls the attention function, and the model's own logits are compared with those of the
engine's steps. A model that cannot be served is refused with one sentence.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.attention import AttentionShape, KVScales, choose
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.config.cache import LayerGroup
from tokenmill_worker.engines.own.device import Device, FusedPass
from tokenmill_worker.engines.own.model import (
    counted_positions,
    kv_scales,
    latent_attention,
    own_attention,
    probe,
    recurrent_layers,
    shortened,
    verify,
)
from tokenmill_worker.engines.own.model.checkpoint import quantization_of, read_checkpoint
from tokenmill_worker.engines.own.model.generation_config import read_defaults
from tokenmill_worker.engines.own.model.layer_groups import (
    Layers,
    describe_layers,
    group_layers,
    shapes_of,
)
from tokenmill_worker.engines.own.model.paged_attention import AttentionStep, Probe, register
from tokenmill_worker.engines.own.types import ProgressCallback

log = logging.getLogger(__name__)


class FusedPassError(Exception):
    """The model can be served, but not with fused modules in place of its own."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for inference, with its layers' attention shapes and groups."""

    model: nn.Module
    config: Any  # the text part of the Transformers configuration
    path: Path
    device: Device
    dtype: torch.dtype
    shapes: dict[int, AttentionShape]  # by index of the layers that attend
    groups: tuple[LayerGroup, ...]
    eos_token_ids: frozenset[int]
    max_model_len: int
    sampling_defaults: SamplingParams
    keeps_rows: bool  # does the model's forward take logits_to_keep?
    # the same pass without Transformers' code around the layers
    fused_pass: FusedPass | None = None
    kv_scales: dict[int, KVScales] = field(default_factory=dict)  # by index; empty: none
    state_bytes: int = 0  # of one recurrent state of every layer; 0: no layer is recurrent

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    def logits(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, step: AttentionStep
    ) -> Tensor:
        """Return logits `[num_rows, vocab]` at `rows` of the packed tokens.

        `input_ids` and `positions` are `[num_tokens]`. Only `rows` reach the head.
        """
        if (
            self.fused_pass is not None
            and (logits := self.fused_pass(input_ids, positions, rows, step)) is not None
        ):
            return logits
        return _logits(self.model, self.keeps_rows, input_ids, positions, rows, step)

    def argmax(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, step: AttentionStep
    ) -> tuple[Tensor, Tensor] | None:
        """Return each row's argmax token and its logit, both `[num_rows]`.

        The first of equal logits wins. Returns None where this would cost no less than all logits.
        The tensors stay valid during the next two calls.
        """
        if self.fused_pass is None or self.fused_pass.num_logits != self.vocab_size:
            return None
        return self.fused_pass.argmax(input_ids, positions, rows, step)


def load_model(
    path: Path, config: EngineConfig, device: Device, on_progress: ProgressCallback | None = None
) -> LoadedModel:
    """Load and check a model.

    Raises EngineConfigError where the model cannot be served, and OSError where there is none.
    """
    report = on_progress or (lambda _what, _fraction: None)
    full_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    dtype = pick_dtype(config.dtype, device, getattr(full_config, "dtype", None))
    # refuse a bad length before the weights are read
    resolve_length(_text_config(full_config, config.model), config.max_model_len)
    quantization = quantization_of(full_config)

    for settings in (config, config.replace(fuse=False)):
        try:
            return describe_model(  # no name holds the first model while the second is read
                read_checkpoint(path, settings, device, dtype, report, quantization),
                path,
                settings,
                device,
            )
        except FusedPassError as error:
            if config.quantization is not None:
                raise EngineConfigError([f"{config.model} cannot be quantised: {error}"]) from error
            # as text: the error's traceback holds the first model
            said = str(error)
            log.warning(
                "%s runs on Transformers' own modules, which is slower: %s", config.model, said
            )
        except torch.OutOfMemoryError as error:
            # what was asked for, not the whole state
            reason = ". ".join(str(error).split(". ")[:2])
            raise EngineConfigError([
                f"{config.model} does not fit into the memory of {device.torch_device}: {reason}"
            ]) from error  # fmt: skip
    raise AssertionError("a model without fused modules raised FusedPassError")


def describe_model(model: Any, path: Path, config: EngineConfig, device: Device) -> LoadedModel:
    """Check and prepare a model that is on its device already; `path` holds its configuration.

    Raises EngineConfigError where it cannot be served, FusedPassError where only its fused modules
    cannot.
    """
    register()
    dtype = next(model.parameters()).dtype
    text_config = _text_config(model.config, config.model)
    model = model.eval().requires_grad_(False)
    keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
    length = resolve_length(text_config, config.max_model_len)
    latent_attention.detach(model)
    own_attention.adapt(model)
    counted_positions.adapt(model)
    recurrent_layers.adapt(model, config.model)
    found = probe.probe_layers(model, config.model)
    layers = describe_layers(found, text_config, config.model, length)
    if recurrent_layers.is_recurrent(model):
        recurrent_layers.check_settings(config)
    layers = latent_attention.adapt(model, layers, config, kv_scales.are_stored(path, config))
    with shortened.first_layers(model, layers):
        probe.check_positions(model, config.model)
    plain = partial(_logits, model, keeps_rows)
    expected: tuple[verify.Expected, ...] = ()
    if config.verify_model:
        expected = verify.verify(model, plain, layers, config.model, length)
        if not expected and config.fuse and config.quantization is None and dtype == torch.float32:
            expected = verify.of_all_layers(model, layers, config.model, length)
    scales = kv_scales.scales_of(model, plain, layers, path, config, length)
    defaults = read_defaults(config.generation_config, path)
    fused_pass = device.replace_modules(model, config)
    loaded = LoadedModel(
        model=model,
        config=text_config,
        path=path,
        device=device,
        dtype=dtype,
        shapes=shapes_of(layers),
        groups=group_layers(layers),
        eos_token_ids=defaults.end_ids(text_config),
        sampling_defaults=defaults.params,
        max_model_len=length,
        keeps_rows=keeps_rows,
        fused_pass=fused_pass,
        kv_scales=scales,
        state_bytes=sum(found.state_bytes.values()),
    )
    if config.fuse or config.quantization is not None:
        _check_fused(loaded, layers, expected, config)
    return loaded


def _check_fused(
    loaded: LoadedModel,
    layers: Layers,
    expected: tuple[verify.Expected, ...],
    config: EngineConfig,
) -> None:
    """Check that the fused pass runs and, where it is exact, yields the expected logits.

    Raises FusedPassError.
    """
    try:
        device = loaded.device.torch_device
        tokens = torch.zeros(2, dtype=torch.int64, device=device)
        loaded.logits(tokens, torch.arange(2, device=device), tokens[:1] + 1, Probe())
        if config.quantization is not None or loaded.dtype != torch.float32 or not expected:
            return
        shapes = list(loaded.shapes.values())
        backend = choose(
            config.attention, device, loaded.dtype, shapes, config.block_size, config.amx
        )
        block_size = backend.block_size_of(config.block_size, device)
        tolerance = verify.least_tolerance(loaded.model)
        found = [
            verify.difference(one, loaded.logits, layers, backend, block_size, tolerance)
            for one in expected
        ]
    except (EngineConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise FusedPassError(
            f"with fused modules its pass fails ({type(error).__name__}: {error})"
        ) from error
    if all(found):
        raise FusedPassError(f"with fused modules its logits differ: {found[0]}")


def _text_config(config: Any, name: str) -> Any:
    """Return the language model's part of the configuration; raises EngineConfigError."""
    try:
        return config.get_text_config()
    except ValueError:
        raise EngineConfigError(
            [f"{name} cannot be served: its configuration describes several decoders"]
        ) from None


# ── what "auto" means ──


def pick_dtype(name: str, device: Device, stored: torch.dtype | None) -> torch.dtype:
    """Return the type of the weights; `stored` is that of the checkpoint."""
    dtype: torch.dtype = device.weight_type(stored) if name == "auto" else getattr(torch, name)
    return dtype


def resolve_length(config: Any, wanted: int | None) -> int:
    """Return the model's own context length, or `wanted` if that is shorter.

    Raises EngineConfigError if `wanted` is longer, or if neither is known.
    """
    names = ("max_position_embeddings", "max_seq_len", "seq_length")  # MPT's and Bloom's
    length = next((found for name in names if (found := getattr(config, name, None))), None)
    scaling = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    if isinstance(scaling, dict) and scaling.get("rope_type") in ("dynamic", "longrope"):
        # These frequencies change with the longest sequence of the batch: past the original length,
        # a result would depend on the other sequences of its batch.
        original = scaling.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        length = original or length
    if length is None or length < 1:  # XLNet says -1
        if wanted is None:
            raise EngineConfigError(
                ["the model does not say its context length: set max_model_len"]
            )
        return wanted
    if wanted is not None and wanted > length:
        raise EngineConfigError([f"max_model_len {wanted} is beyond the model's {length}"])
    return int(wanted or length)


# ── running it ──


@torch.inference_mode()
def _logits(
    model: nn.Module,
    keeps_rows: bool,
    input_ids: Tensor,
    positions: Tensor,
    rows: Tensor,
    step: AttentionStep,
) -> Tensor:
    inputs = {
        "input_ids": input_ids[None],
        "position_ids": positions[None],
        "use_cache": False,
        "paged": step,
    }
    if keeps_rows:
        logits: Tensor = model(**inputs, logits_to_keep=rows).logits
        return logits[0]
    logits = model(**inputs).logits
    return logits[0, rows]
