"""Scales of keys and values in 8 bits: read from the checkpoint or calculated, and what they do.

The models' keys and values are a power of two larger than 8 bits hold, and their queries and output
weights as much smaller: with the right scale each number is stored in the same bits as before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ops.benchmarks.commands.quality import measure
from ops.model_families import trial
from tests.engines.own.truth import tiny_models
from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.attention import AttentionShape
from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.execution.build import build_runner
from tokenmill_worker.engines.own.model import kv_scales
from tokenmill_worker.engines.own.model.loader import load_model

IDS = [(7 * i * i + 3) % tiny_models.VOCAB for i in range(60)]
KEYS, VALUES = (2.0**20, 2.0**24), (2.0**22, 2.0**19)  # by head: beyond 448 and beyond 57,344


def config(folder: Path, kind: str = "float8_e4m3fn", **changes: object) -> EngineConfig:
    settings = {"block_size": 4, "num_blocks": 64, "verify_model": False, **changes}
    return EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_dtype=kind, **settings)  # type: ignore[arg-type]


def enlarged(source: Path, folder: Path, scales: dict[str, Tensor]) -> Path:
    """Write the model with larger keys and values, and these tensors in each layer's attention."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    settings = json.loads((source / "config.json").read_text())
    group = settings["num_attention_heads"] // settings["num_key_value_heads"]
    by_name: dict[str, tuple[float, ...]] = {"k_proj": KEYS, "v_proj": VALUES}
    for name, factors in (("q_proj", KEYS), ("o_proj", VALUES)):
        by_name[name] = tuple(1 / factor for factor in factors for _ in range(group))
    for name in list(weights):
        if own := by_name.get(name.split(".")[-2]):
            turned = weights[name].T if "o_proj" in name else weights[name]
            rows = turned.unflatten(0, (len(own), -1)) * torch.tensor(own)[:, None, None]
            turned = rows.flatten(0, 1)
            weights[name] = (turned.T if "o_proj" in name else turned).contiguous()
        if name.endswith("o_proj.weight"):
            prefix = name.removesuffix("o_proj.weight")
            weights |= {prefix + part: scale.clone() for part, scale in scales.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_scales_of_the_checkpoint_bring_each_number_into_range(
    kind: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = folder_of("llama")
    by_head = {"k_scale": torch.tensor(KEYS), "v_scale": torch.tensor(VALUES)[:, None, None]}
    scaled = enlarged(source, tmp_path / "scaled", by_head)
    plain = enlarged(source, tmp_path / "plain", {})
    expected = measure(config(source, kind), [IDS], 1).nll
    exact = measure(config(source, "float32"), [IDS], 1).nll
    assert expected != exact
    assert abs(expected - exact) < 0.05
    for changes in ({}, {"fuse": False}, {"attention": "reference"}):
        found = measure(config(scaled, kind, **changes), [IDS], 1).nll
        assert found == pytest.approx(expected, abs=2e-4), changes
    assert abs(measure(config(plain, kind), [IDS], 1).nll - exact) > 0.05, "nothing overflowed"
    calculated = measure(config(plain, kind, calculate_kv_scales=True), [IDS], 1).nll
    assert abs(calculated - exact) < 0.05


def test_scaled_8_bit_keys_and_values_give_the_same_answers(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = folder_of("llama")
    by_head = {"k_scale": torch.tensor(KEYS), "v_scale": torch.tensor(VALUES)}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for folder in (source, enlarged(source, tmp_path / "scaled", by_head)):
        settings = config(folder, max_num_batched_tokens=16)
        engine = CollectingEngine.around(
            build_runner(load_model(folder, settings, CpuDevice()), settings)
        )
        outputs = engine.generate_batch([IDS[:30], IDS[30:33]], [params] * 2)
        answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("self_attn.k_scale", "self_attn.v_scale"), (2.0, 3.0)),
        (("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"), (2.0, 3.0)),
        (("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"), (2.0, 3.0)),
        (("self_attn.kv_scale", "self_attn.q_scale"), (2.0, 2.0)),
        (("self_attn.k_proj.weight_scale", "self_attn.k_proj.input_scale"), None),
        (("attn.v_scale", "mlp.experts.1.up_proj.weight_scale"), (1.0, 3.0 - 1.0)),
    ],
)
def test_scales_are_read_under_each_of_their_names(
    names: tuple[str, str], expected: tuple[float, float] | None, tmp_path: Path
) -> None:
    shapes = dict.fromkeys(range(2), AttentionShape(4, 2, 16, 0.25))
    tensors = {f"model.layers.1.{names[0]}": torch.tensor(2.0)}
    tensors[f"model.layers.1.{names[1]}"] = torch.tensor([3.0])
    save_file(tensors, tmp_path / "model.safetensors")
    found = kv_scales._stored(tmp_path, shapes, "MODEL")
    if expected is None:
        assert found == {}
        return
    assert [[side.tolist() for side in layer] for layer in found.values()] == [
        [[1.0, 1.0], [1.0, 1.0]],
        [[side] * 2 for side in expected],
    ]


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (torch.tensor([1.0, 0.0]), "it is [1.0, 0.0]"),
        (torch.tensor(float("nan")), "it is [nan]"),
        (torch.ones(3), "it has 3 numbers: one, or one of each of 2 heads, is read"),
    ],
)
def test_a_scale_that_cannot_be_used_is_refused(scale: Tensor, reason: str, tmp_path: Path) -> None:
    save_file({"model.layers.0.self_attn.k_scale": scale}, tmp_path / "model.safetensors")
    with pytest.raises(EngineConfigError) as caught:
        kv_scales._stored(tmp_path, {0: AttentionShape(4, 2, 16, 0.25)}, "MODEL")
    words = "MODEL has no usable k_scale of layer 0 for keys and values in 8 bits: "
    assert caught.value.problems == [words + reason]


def test_keys_that_carry_biases_are_not_stored_in_8_bits() -> None:
    found = trial.run("bloom", kv_dtype="float8_e4m3fn")
    words = "its keys carry ALiBi's biases, which 8 bits do not hold"
    assert found.outcome == "refused"
    assert found.reason.endswith(words)
    with pytest.raises(EngineConfigError, match="needs 8 bits, not kv_dtype auto"):
        EngineConfig(model="any", calculate_kv_scales=True)
