"""Quantised models through the engine: what is packed how, what is refused, and what it costs on a
real model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ops.benchmarks.commands.quality import config_of, measure, text_windows
from tests.engines.own.truth import tiny_models
from tests.support.collecting_engine import CollectingEngine
from tests.support.marks import LONG, long_unless
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.cpu.fused import Packing, prepare_weights
from tokenmill_worker.engines.own.cpu.fused.modules import FusedAttention, FusedMLP, PackedLinear
from tokenmill_worker.engines.own.model.loader import load_model
from tokenmill_worker.engines.own.model.model_files import ModelNotFoundError, resolve

pytestmark = pytest.mark.usefixtures("linear_kernels")


def config(folder: Path, quantization: str | None, **changes: object) -> EngineConfig:
    settings = {
        "model": str(folder),
        "device": "cpu",
        "block_size": 4,
        "num_blocks": 200,
        "max_num_seqs": 8,
        **changes,
    }
    return EngineConfig(**settings, quantization=quantization)  # type: ignore[arg-type]


def bits(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """Return the data types of the panels by kind of module. An int32 holds eight 4-bit codes."""
    found: dict[str, set[torch.dtype]] = {"attention": set(), "mlp": set(), "linear": set()}
    for module in model.modules():
        if isinstance(module, FusedAttention):
            found["attention"] |= {module.qkv.panels.dtype, module.out.panels.dtype}
        elif isinstance(module, FusedMLP):
            found["mlp"] |= {module.gate_up.panels.dtype, module.down.panels.dtype}
        elif isinstance(module, PackedLinear):
            found["linear"].add(module.packed.panels.dtype)
    return found


def test_every_product_is_quantised_and_the_head_keeps_8_bits(
    folder_of: Callable[[str], Path],
) -> None:
    int8 = load_model(folder_of("llama"), config(folder_of("llama"), "int8"), CpuDevice()).model
    assert bits(int8) == {"attention": {torch.uint8}, "mlp": {torch.uint8}, "linear": {torch.uint8}}
    int4 = load_model(folder_of("llama"), config(folder_of("llama"), "int4"), CpuDevice()).model
    assert bits(int4) == {"attention": {torch.int32}, "mlp": {torch.int32}, "linear": {torch.uint8}}


def test_a_bfloat16_model_stays_bfloat16_in_memory_and_gives_the_same_bits(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Most checkpoints are bfloat16; float32 steps read these weights at half the traffic."""
    original: Any = load_model(
        folder_of("llama"), config(folder_of("llama"), None, fuse=False), CpuDevice()
    ).model
    original.bfloat16().save_pretrained(tmp_path)
    plain = config(tmp_path, None, dtype="float32", narrow_weights=False, amx=False)
    narrow = plain.replace(narrow_weights=True)
    half, whole = {torch.bfloat16}, {torch.float32}
    assert bits(load_model(tmp_path, narrow, CpuDevice()).model) == {
        "attention": half,
        "mlp": half,
        "linear": half,
    }
    assert bits(load_model(tmp_path, plain, CpuDevice()).model) == {
        "attention": whole,
        "mlp": whole,
        "linear": whole,
    }
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, top_logprobs=20)
    answers = []
    for one in (narrow, plain):
        with CollectingEngine.load(one) as engine:
            outputs = engine.generate_batch(
                [list(range(3, 3 + n)) for n in (1, 5, 30, 41)], [params] * 4
            )
            answers.append([(output.token_ids, output.logprobs) for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("quantization", "asked", "expected"),
    [
        ("int8", "auto", torch.float16),
        ("int4", "float32", torch.float32),
        (None, "auto", torch.float32),
        (None, "float8_e4m3fn", torch.float8_e4m3fn),
    ],
)
def test_keys_and_values_take_half_precision_beside_rounded_weights(
    folder_of: Callable[[str], Path], quantization: str | None, asked: str, expected: torch.dtype
) -> None:
    with CollectingEngine.load(config(folder_of("llama"), quantization, kv_dtype=asked)) as engine:
        assert engine.runner.info.config.kv_dtype == str(expected).removeprefix("torch.")


def test_a_weight_that_does_not_fit_4_bits_takes_8() -> None:
    packing = Packing.choose("int4")
    assert packing.body.pack(torch.randn(16, 64)).panels.dtype is torch.int32
    assert packing.body.pack(torch.randn(16, 40)).panels.dtype is torch.uint8
    assert Packing.choose("int8").body.pack(torch.randn(1, 65_537)).panels.dtype is torch.float32


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "name", long_unless({"llama", "gemma3"}, ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt2"])
)
def test_a_quantised_family_stays_near_the_likelihood_of_rounded_weights(
    name: str, quantization: str, folder_of: Callable[[str], Path]
) -> None:
    """The same likelihood of a text as with weights and activations rounded, within what rounding
    may cost.
    """
    ids = [(7 * i * i + 3) % tiny_models.VOCAB for i in range(60)]
    exact = measure(config(folder_of(name), None), [ids], 1).nll
    found = measure(config(folder_of(name), quantization), [ids], 1).nll
    assert found != exact, "nothing was quantised"
    assert abs(found - exact) < (0.35 if quantization == "int8" else 2.0)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_answers_do_not_depend_on_batch_or_chunks(
    quantization: str, folder_of: Callable[[str], Path]
) -> None:
    prompts = [list(range(3, 3 + n)) for n in (1, 5, 30, 41)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for chunk, together in ((512, True), (7, True), (64, False)):
        with CollectingEngine.load(
            config(folder_of("qwen3"), quantization, max_num_batched_tokens=chunk)
        ) as engine:
            groups = [prompts] if together else [[prompt] for prompt in prompts]
            outputs = [
                o for group in groups for o in engine.generate_batch(group, [params] * len(group))
            ]
        answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1] == answers[2]


def test_weights_that_stay_float32_are_logged(
    folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_model(folder_of("llama"), config(folder_of("llama"), "int8"), CpuDevice())
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        load_model(folder_of("mixtral"), config(folder_of("mixtral"), "int8"), CpuDevice())
    assert "are not quantised and stay float32" in caplog.text


def test_a_model_without_quantisable_layers_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="no layer of odd can be quantised"):
        prepare_weights(
            nn.Sequential(nn.Bilinear(3, 3, 3)), EngineConfig(model="odd", quantization="int8")
        )


# ── a real model ──


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loss_of_quantization_on_real_text_is_bounded(rounds: int) -> None:
    """SmolLM2 came out of 4-bit blocks of 32 (GGUF Q4_1): 4 bits cost it little more than the
    head's rounding. The long form tries each kind by itself too.
    """
    name, both = "smollm2-135m-instruct", "int8+float8_e4m3fn"
    try:
        resolve(name)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    windows = text_windows(name, 3, 128)
    bounds = {both: 0.08}
    if rounds >= LONG:
        bounds |= {"int4": 0.02, "int8": 0.06, "float8_e4m3fn": 0.03}
    few = {"max_memory_gib": 0.1, "verify_model": False}
    found = {
        kind: measure(config_of(name, kind).replace(**few), windows, 1)
        for kind in ("float32", *bounds)
    }
    exact = found["float32"]
    assert 2.0 < exact.nll < 4.0, "a text that the model can read"
    for kind, bound in bounds.items():
        assert 0.0 < abs(found[kind].nll - exact.nll) < bound, kind
    assert len({one.nll for one in found.values()}) == len(found), "a kind of two parts sets both"
    if rounds >= LONG:
        firsts = [[answer[0] for answer in one.answers] for one in (exact, found["int4"])]
        assert sum(a == b for a, b in zip(*firsts, strict=True)) >= 2
