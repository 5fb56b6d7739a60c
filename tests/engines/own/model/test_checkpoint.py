"""Checkpoints as the hub has them: quantised ones are read by Transformers' quantisers, or refused.

A refusal is one sentence that names the method and what is missing.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.collecting_engine import CollectingEngine
from tokenmill_worker.engines.own import EngineConfig, SamplingParams
from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.execution.build import build_runner
from tokenmill_worker.engines.own.model import checkpoint
from tokenmill_worker.engines.own.model.loader import load_model

BLOCK = 16  # rows and columns that share a scale
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
# method: the package that it needs, and more of its configuration
LACKING: dict[str, tuple[str, dict[str, Any]]] = {
    "awq": ("gptqmodel", {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "gptq": ("gptqmodel", {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "compressed-tensors": ("compressed_tensors", {"format": "float-quantized"}),
    "bitsandbytes": ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}


def write(
    source: Path, folder: Path, weights: dict[str, Tensor], quantization: dict[str, Any] | None
) -> Path:
    shutil.copytree(source, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        settings["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def block_scaled(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight in 8 bits, the scales of its blocks, and what both stand for."""
    rows, columns = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    spread = scales[:, None, :, None]
    narrow = (blocks / spread).to(torch.float8_e4m3fn)
    wide = (narrow.float() * spread).view(rows, columns)
    return narrow.view(rows, columns), scales, wide


def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device="cpu", dtype="float32", block_size=4, num_blocks=64
    )


def answers(folder: Path) -> list[tuple[int, ...]]:
    settings = config(folder)
    engine = CollectingEngine.around(
        build_runner(load_model(folder, settings, CpuDevice()), settings)
    )
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [tuple(one.token_ids) for one in engine.generate_batch([(5, 9, 20), (7, 8)], params)]


def test_block_scaled_8_bit_weights_answer_as_their_decoded_weights(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = folder_of("llama")
    narrow: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            narrow[name], scales, wide[name] = block_scaled(weight)
            narrow[name.replace(".weight", ".weight_scale_inv")] = scales
        else:
            narrow[name] = wide[name] = weight
    quantised = answers(write(source, tmp_path / "narrow", narrow, FP8))
    assert quantised == answers(write(source, tmp_path / "wide", wide, None))
    assert {len(tokens) for tokens in quantised} == {12}


def refusal(folder: Path) -> str:
    with pytest.raises(EngineConfigError) as caught:
        load_model(folder, config(folder), CpuDevice())
    (sentence,) = caught.value.problems
    assert "\n" not in sentence
    return sentence.removeprefix(f"{folder} ")


@pytest.mark.parametrize("method", LACKING)
def test_a_quantization_method_whose_package_is_missing_is_refused(
    method: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    package, more = LACKING[method]
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    source = folder_of("llama")
    weights = load_file(source / "model.safetensors")
    folder = write(source, tmp_path / "model", weights, {"quant_method": method, **more})
    beginning = f"cannot be loaded, its weights are quantised ({method}): "
    assert refusal(folder).startswith(beginning)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
        ({"bits": 4}, "no quant_method"),
    ],
)
def test_a_quantization_method_that_transformers_skips_is_refused(
    quantization: dict[str, Any], named: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Transformers would read such weights as plain ones, with a warning."""
    source = folder_of("llama")
    weights = load_file(source / "model.safetensors")
    said = refusal(write(source, tmp_path / "model", weights, quantization))
    assert said.startswith(f"cannot be served: its weights are quantised ({named}), which ")


def test_a_checkpoint_that_lacks_weights_is_refused(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Transformers would draw them at random, with a warning."""
    source = folder_of("llama")
    weights = load_file(source / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".mlp." not in name}
    said = refusal(write(source, tmp_path / "model", kept, None))
    assert said == (
        f"cannot be served: its files lack {len(weights) - len(kept)} weights "
        "(model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight, "
        "model.layers.0.mlp.up_proj.weight, …)"
    )


def test_progress_is_reported_while_weights_are_read(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "REPORT_S", 0.0)
    said: list[tuple[str, float]] = []
    folder = folder_of("llama")
    load_model(folder, config(folder), CpuDevice(), lambda what, share: said.append((what, share)))
    count = len(load_file(folder / "model.safetensors"))
    assert said == [(f"loading {folder}", (index + 1) / count) for index in range(count)]
