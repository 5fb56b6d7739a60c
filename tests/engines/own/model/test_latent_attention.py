"""Layers with latent attention keep their keys and values compressed, wherever the settings and the
backend allow it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ops.benchmarks.commands.quality import measure
from ops.model_families import small
from tests.engines.own.truth import tiny_models
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.attention.reference import ReferenceAttention
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.execution.build import runner_of_model
from tokenmill_worker.engines.own.execution.memory import memory_shape
from tokenmill_worker.engines.own.model import latent_attention
from tokenmill_worker.engines.own.model.latent_attention import LatentForm
from tokenmill_worker.engines.own.model.loader import LoadedModel, load_model
from tokenmill_worker.engines.own.model.probe import OWN

EXPANDED, LATENT = (4, 24), (1, 24)  # key heads and their size, in the tiny DeepSeek V3


def config(folder: Path, **changes: object) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "fuse": False,
        "attention": "reference",
        "num_blocks": 8,
    }
    return EngineConfig(**{**settings, **changes})


def form_of(loaded: LoadedModel) -> tuple[int, int]:
    (group,) = loaded.groups
    return group.num_kv_heads, group.head_dim


def changed(folder: Path, tmp_path: Path, **changes: object) -> Path:
    """Save a model like that of the folder, with random weights and some other sizes."""
    configuration = transformers.AutoConfig.from_pretrained(folder)
    configuration.update(changes)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(configuration).save_pretrained(tmp_path)
    return tmp_path


def test_a_token_takes_the_bytes_of_its_latents(
    folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(folder_of("deepseek_v3"), block_size=16)
    with caplog.at_level(logging.INFO):
        loaded = load_model(folder_of("deepseek_v3"), settings, CpuDevice())
    assert form_of(loaded) == LATENT
    shape = memory_shape(loaded, settings, ReferenceAttention(), torch.bfloat16, 64)
    assert shape.block_bytes == 16 * len(loaded.shapes) * 2 * 24 * 2
    expected = "latents, 48 numbers a token and layer; the keys and values of every head would be"
    assert f"{expected} 192" in caplog.text


@pytest.mark.parametrize(
    ("changes", "sizes", "reason"),
    [
        ({"adapters": "poet=/adapters/poet"}, {}, "an adapter may change the weight"),
        ({"attention": "cpu"}, {"kv_lora_rank": 20}, "multiples of 8 up to 1024, not 28"),
        ({}, {"kv_lora_rank": 88}, "they would take no less"),
    ],
    ids=["adapters", "backend", "no smaller"],
)
def test_the_log_has_the_reason_why_keys_are_kept_per_head(
    changes: dict[str, object],
    sizes: dict[str, object],
    reason: str,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = changed(folder_of("deepseek_v3"), tmp_path, **sizes)
    with caplog.at_level(logging.INFO):
        assert form_of(load_model(folder, config(folder, **changes), CpuDevice())) == EXPANDED
    assert "192 numbers a token and layer: no latents, because" in caplog.text
    assert reason in caplog.text


def test_stored_scales_keep_keys_per_head(folder_of: Callable[[str], Path]) -> None:
    settings = config(folder_of("deepseek_v3"))
    assert latent_attention._unfit_settings(settings, has_kv_scales=False) is None
    assert latent_attention._unfit_settings(settings, has_kv_scales=True) is not None


def attention_of(folder: Path) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.model.layers[0].self_attn


def test_a_module_that_computes_other_keys_keeps_keys_per_head(
    folder_of: Callable[[str], Path],
) -> None:
    module = attention_of(folder_of("deepseek_v3"))
    assert LatentForm.of(module) is not None
    own = module.expand_kv
    module.expand_kv = lambda latent, rotated: own(2 * latent, rotated)
    assert LatentForm.of(module) is None
    module.expand_kv = own
    module.kv_b_proj = torch.nn.Sequential(module.kv_b_proj)  # any other class of layer
    assert LatentForm.of(module) is None


def test_a_model_with_latent_attention_serves_a_second_engine_and_its_own_passes(
    folder_of: Callable[[str], Path],
) -> None:
    folder = folder_of("deepseek_v3")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    expected = model(input_ids=ids).logits
    for attention in ("reference", "cpu"):
        runner = runner_of_model(model, config(folder, attention=attention))
        assert runner.info.cache_config.groups[0].num_kv_heads == LATENT[0]
    model.set_attn_implementation(OWN)
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "size"), [("deepseek_v2", 24), ("glm4_moe_lite", 32), ("minicpm3", 24)]
)
def test_each_family_with_latent_attention_keeps_latents(
    family: str, size: int, tmp_path: Path
) -> None:
    small.build(family).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, config(tmp_path, verify_model=False), CpuDevice())
    assert form_of(loaded) == (1, size)


def test_calculated_scales_bring_latents_into_the_range_of_8_bits(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, factor = tmp_path / "enlarged", 2.0**12
    shutil.copytree(folder_of("deepseek_v3"), folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():  # keys become larger, queries as much smaller
        if name.endswith("kv_a_layernorm.weight"):
            weight *= factor
        elif name.endswith("kv_a_proj_with_mqa.weight"):
            weight[-8:] *= factor
        elif name.endswith("kv_b_proj.weight"):
            weight /= factor
        elif name.endswith("q_b_proj.weight"):
            weight.view(4, 24, -1)[:, 16:] /= factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def loss(kind: str, **changes: object) -> float:
        ids = [(7 * i * i + 3) % tiny_models.VOCAB for i in range(60)]
        settings = config(folder, kv_dtype=kind, num_blocks=64, verify_model=False, **changes)
        return measure(settings, [ids], 1).nll

    exact = loss("float32")
    assert abs(loss("float8_e4m3fn", calculate_kv_scales=True) - exact) < 0.05
    assert abs(loss("float8_e4m3fn") - exact) > 0.05, "nothing overflowed"
