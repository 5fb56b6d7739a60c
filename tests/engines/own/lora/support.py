"""Saves adapters as peft writes them, with weights that change every answer, and runs peft."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.truth import expected, tiny_models
from tests.engines.own.truth.expected import Expected
from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def save_adapter(model_folder: Path, folder: Path, seed: int, **changes: Any) -> Path:
    """Save a random adapter for this model; `changes` are options of LoraConfig."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": [*ATTENTION, *MLP],
        "task_type": "CAUSAL_LM",
    } | changes
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice on options
        adapted = get_peft_model(model, LoraConfig(**options))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.25)
        adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def peft_answers(
    model_folder: Path, adapter: Path | None, family: str, sizes: list[tuple[int, int]]
) -> list[Expected]:
    """Return greedy answers for (prompt length, answer length), with the adapter or without."""
    attention = tiny_models.FAMILIES[family].attention
    model: Any = expected.load(model_folder, attention)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    return [
        expected.clear_answer(model, length, count, tiny_models.VOCAB) for length, count in sizes
    ]


def engine_with(
    model_folder: Path, adapters: dict[str, Path], **changes: object
) -> CollectingEngine:
    settings: dict[str, object] = {
        "model": str(model_folder), "dtype": "float32", "device": "cpu", "attention": "reference",
        "fuse": False,
        "block_size": 4, "num_blocks": 300, "max_num_seqs": 8, "max_num_batched_tokens": 4096,
        "num_threads": 1,
        "adapters": ",".join(f"{name}={folder}" for name, folder in adapters.items()),
    }  # fmt: skip
    return CollectingEngine.load(EngineConfig(**{**settings, **changes}))  # type: ignore[arg-type]


def greedy(max_tokens: int, lora: str = "") -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, lora=lora)


def run(
    engine: CollectingEngine, wanted: list[tuple[str, Expected]], join_every: int = 1
) -> list[tuple[int, ...]]:
    """Run requests (adapter's name, expected) that join one by one; return their answers."""
    ids = []
    for name, one in wanted:
        ids.append(engine.add_request(one.prompt, greedy(len(one.answer), name)))
        for _ in range(join_every):
            engine.step()
    outputs = [engine.result(request_id) for request_id in ids]
    assert all(output.error is None for output in outputs), outputs
    check_integrity(engine.scheduler)
    return [output.token_ids for output in outputs]
