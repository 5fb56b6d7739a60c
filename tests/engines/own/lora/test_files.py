"""Reading peft's files: scaling as peft computes it, and refusals by name of what would not run as
it was trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.own.lora.support import save_adapter
from tests.engines.own.truth import expected, tiny_models
from tokenmill_worker.engines.own.lora.adapters import Adapters
from tokenmill_worker.engines.own.lora.files import CONFIG, WEIGHTS, AdapterError, read_adapter


@pytest.fixture
def adapter(llama: Path, tmp_path: Path) -> Path:
    return save_adapter(llama, tmp_path / "adapter", 1, target_modules=["q_proj"])


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


@pytest.mark.parametrize("rslora", [False, True])
def test_scaling_equals_peft_s(llama: Path, tmp_path: Path, rslora: bool) -> None:
    from peft import PeftModel

    patterns: dict[str, Any] = {
        "rank_pattern": {"v_proj": 2, "layers.1.self_attn.q_proj": 6},
        "alpha_pattern": {
            "model.layers.0.*q_proj": 3,
            "down_proj": 32,
            "layers.2.mlp.down_proj": 5,
        },
    }
    folder = save_adapter(llama, tmp_path / "a", 3, use_rslora=rslora, **patterns)
    base: Any = expected.load(llama)
    theirs = dict(PeftModel.from_pretrained(base, folder).named_modules())
    ours = read_adapter(folder).layers
    assert len(ours) == 4 * 7
    for path, factors in ours.items():
        module: Any = theirs[f"base_model.model.{path}"]
        torch.testing.assert_close(factors.b @ factors.a, module.get_delta_weight("default"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, r"DoRA \(use_dora\)"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "adapted embeddings"),
        ({"modules_to_save": ["lm_head"]}, r"whole trained layers \(modules_to_save\)"),
        ({"bias": "all"}, r"trained biases \(bias 'all'\)"),
        ({"lora_bias": True}, r"biases \(lora_bias\)"),
        ({"trainable_token_indices": [1, 2]}, "trained token embeddings"),
    ],
)
def test_unsupported_adapter_options_are_refused_by_name(
    llama: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        read_adapter(save_adapter(llama, tmp_path / "a", 1, **options))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "it is of type 'IA3'; only LORA"),
        ({"init_lora_weights": "pissa_niter_16"}, "a changed base model"),
        ({"use_next_years_trick": True}, "the option use_next_years_trick"),
        ({"lora_alpha": "much"}, "'much', which is no number"),
    ],
)
def test_invalid_adapter_configurations_are_refused(
    adapter: Path, changes: dict[str, Any], words: str
) -> None:
    change_config(adapter, **changes)
    with pytest.raises(AdapterError, match=words):
        read_adapter(adapter)


def test_values_that_are_not_finite_are_refused(adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(AdapterError, match="not finite"):
        read_adapter(adapter)


def test_missing_and_unreadable_adapter_files_are_refused(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="there is no folder"):
        read_adapter(tmp_path / "none")
    (adapter / WEIGHTS).write_bytes(b"\x08not safetensors")
    with pytest.raises(AdapterError, match="cannot be read"):
        read_adapter(adapter)
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match="a pickle, which is never read"):
        read_adapter(adapter)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["embed_tokens"], "adapted embeddings"),
        (["c_attn"], "this model has no such layer 'c_attn'"),
    ],
)
def test_adapters_of_layers_that_the_model_lacks_are_refused(
    llama: Path, tmp_path: Path, targets: list[str], words: str
) -> None:
    base = llama if targets == ["embed_tokens"] else tiny_models.save("gpt2", tmp_path / "gpt2")
    folder = save_adapter(base, tmp_path / "a", 1, target_modules=targets)
    model: Any = expected.load(llama)
    problems = Adapters(model, {"odd": folder}, max_cached=1).check(lambda _what, _fraction: None)
    assert len(problems) == 1
    assert problems[0].startswith("adapters adapter 'odd' cannot be used: ")
    assert words in problems[0]


def test_an_adapter_of_a_larger_model_is_refused_with_both_shapes(
    llama: Path, adapter: Path
) -> None:
    tensors = {
        name: torch.cat([t, t], dim=int("lora_A" in name))
        for name, t in load_file(adapter / WEIGHTS).items()
    }
    save_file(tensors, adapter / WEIGHTS)
    model: Any = expected.load(llama)
    [problem] = Adapters(model, {"big": adapter}, max_cached=1).check(lambda _what, _fraction: None)
    assert "is for a layer of shape (128, 128), the model's is (64, 64)" in problem
