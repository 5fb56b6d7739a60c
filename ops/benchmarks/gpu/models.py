"""Models of known shapes with random weights on the device.

The same seed gives the same weights, so two engines can each have a model of their own.
"""

import gc
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ops.benchmarks.measure.step_floor import Shape
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.execution.build import pick_device
from tokenmill_worker.engines.own.model.loader import LoadedModel, describe_model
from tokenmill_worker.engines.own.model.paged_attention import IMPLEMENTATION, register


def random_model(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """Build the model with our attention, directly on the device; nothing is written to disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    fields = asdict(shape)
    config = AutoConfig.for_model(
        fields.pop("model_type"), **fields, tie_word_embeddings=False, eos_token_id=0
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=IMPLEMENTATION
        )
    return model.eval().requires_grad_(False)


def describe(model: Any, config: EngineConfig) -> LoadedModel:
    """Return the model as the engine's loader would; fuses it if the configuration says so."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return describe_model(model, Path(folder), config, pick_device(config.device))


def forget() -> None:
    """Free the memory of dropped objects, on the GPU too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
