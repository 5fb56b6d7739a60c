"""Llama 4, whose layers count positions themselves, gets those of a step's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama4 import Llama4ForConditionalGeneration

from ops.model_families import small
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.model import counted_positions
from tokenmill_worker.engines.own.model.loader import load_model


def saved(folder: Path) -> Any:
    """Save a checkpoint that takes images too; its full layers scale queries by position / 4."""
    config = small.configuration("llama4", "temperature tuning")
    vision = config.vision_config
    vision.num_hidden_layers, vision.num_attention_heads = 1, 2
    vision.hidden_size = vision.intermediate_size = vision.vision_output_dim = 16
    vision.projector_input_dim = vision.projector_output_dim = 16
    torch.manual_seed(0)
    model: Any = Llama4ForConditionalGeneration._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.language_model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)
    return model


def config(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", device="cpu", fuse=False)


def test_the_text_part_of_llama_4_gives_its_own_logits(tmp_path: Path) -> None:
    """Its steps give the logits of its own pass: prompts cross chunks and steps of the scale."""
    whole = saved(tmp_path)
    loaded = load_model(tmp_path, config(tmp_path), CpuDevice())
    assert [group.window for group in loaded.groups] == [Window(8, is_chunked=True), None]
    assert all(shape.is_chunked is (i < 3) for i, shape in loaded.shapes.items())
    name = "model.layers.3.self_attn.q_proj.weight"
    assert torch.equal(loaded.model.get_parameter(name), whole.language_model.get_parameter(name))


def test_without_adapted_positions_llama_4_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    monkeypatch.setattr(counted_positions, "adapt", lambda model: None)
    with pytest.raises(EngineConfigError, match="its logits differ from those of its own forward"):
        load_model(tmp_path, config(tmp_path), CpuDevice())
