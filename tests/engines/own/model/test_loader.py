"""Loading: what is read from a model's folder, what "auto" means, and the sentences of refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.engines.own.truth import tiny_models
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.device import Device
from tokenmill_worker.engines.own.model import loader
from tokenmill_worker.engines.own.model.loader import load_model
from tokenmill_worker.engines.own.model.paged_attention import Probe


def config(folder: Path, **changes: object) -> EngineConfig:
    fields: dict[str, Any] = {"model": str(folder), "dtype": "float32", "device": "cpu"}
    return EngineConfig(**{**fields, "fuse": False, **changes})


def test_layers_length_and_end_tokens_are_read_from_a_folder(llama: Path) -> None:
    loaded = load_model(llama, config(llama), CpuDevice())
    assert loaded.vocab_size == tiny_models.VOCAB
    assert loaded.max_model_len == 256
    assert loaded.eos_token_ids == {2}
    assert [group.layers for group in loaded.groups] == [(0, 1, 2, 3)]
    shapes = set(loaded.shapes.values())
    assert {(one.num_heads, one.num_kv_heads, one.head_dim) for one in shapes} == {(4, 2, 16)}
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_a_chat_model_may_have_several_end_tokens(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_model(tmp_path, config(tmp_path), CpuDevice()).eos_token_ids == {2, 7}


def test_the_head_gets_only_the_sampled_rows(llama: Path) -> None:
    loaded = load_model(llama, config(llama), CpuDevice())
    seen: list[int] = []
    loaded.model.lm_head.register_forward_hook(lambda _m, args, _o: seen.append(args[0].shape[1]))  # type: ignore[union-attr]
    rows = torch.tensor([1, 4])
    logits = loaded.logits(torch.arange(6), torch.arange(6), rows, Probe())
    assert logits.shape == (2, tiny_models.VOCAB)
    assert seen == [2]


def test_transformers_builds_no_mask_during_a_step(llama: Path) -> None:
    """A mask over all packed tokens would grow with the square of the step."""
    loaded = load_model(llama, config(llama), CpuDevice())
    masks: list[object] = []
    for module in loaded.model.modules():
        if type(module).__name__ == "LlamaAttention":
            module.register_forward_pre_hook(
                lambda _m, _args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
            )
    loaded.logits(torch.arange(6), torch.arange(6), torch.tensor([5]), Probe())
    assert masks == [None] * 4


def test_a_longer_context_than_the_models_is_refused(llama: Path) -> None:
    with pytest.raises(EngineConfigError, match="max_model_len 300 is beyond the model's 256"):
        load_model(llama, config(llama, max_model_len=300), CpuDevice())
    assert load_model(llama, config(llama, max_model_len=100), CpuDevice()).max_model_len == 100


def test_rotary_frequencies_that_depend_on_the_batch_bound_the_context() -> None:
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    settings = SimpleNamespace(max_position_embeddings=131_072, rope_parameters=scaling)
    assert loader.resolve_length(settings, None) == 4096
    with pytest.raises(EngineConfigError, match="beyond the model's 4096"):
        loader.resolve_length(settings, 8192)


def test_attention_that_does_not_go_through_the_interface_is_refused(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    mamba = transformers.MambaConfig(**sizes, state_size=4)
    transformers.AutoModelForCausalLM.from_config(mamba).save_pretrained(tmp_path)
    with pytest.raises(EngineConfigError, match=r"cannot be (served|loaded)"):
        load_model(tmp_path, config(tmp_path, max_model_len=64), CpuDevice())


def test_auto_means_float32_on_cpu_and_half_precision_elsewhere() -> None:
    cuda = Device(torch.device("cuda"))
    assert loader.pick_dtype("auto", CpuDevice(), torch.bfloat16) is torch.float32
    assert loader.pick_dtype("auto", cuda, torch.float16) is torch.float16
    assert loader.pick_dtype("auto", cuda, torch.float32) is torch.bfloat16
    assert loader.pick_dtype("float32", cuda, torch.bfloat16) is torch.float32
