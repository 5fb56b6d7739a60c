"""Rows of several adapters and of none in one step: each answers as `PeftModel.generate` does, in
float32, greedily.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.own.cuda.steps import fake_capture
from tests.engines.own.lora.support import (
    ATTENTION,
    MLP,
    engine_with,
    peft_answers,
    run,
    save_adapter,
)
from tests.engines.own.truth.expected import Expected
from tests.support.collecting_engine import CollectingEngine
from tests.support.marks import long_unless
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.cuda.graphs import GraphRunner

SIZES = [(5, 16), (33, 12), (17, 20)]
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": [*ATTENTION, *MLP, "lm_head"]},
    "gemma3": {},
    "qwen2": {"use_rslora": True},
    "phi3": {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
}
PATHS: dict[str, dict[str, object]] = {
    "modules": {},
    "fused": {"attention": "cpu", "fuse": True, "block_size": 16},
    "graphs": {"cuda_graphs": True, "q_padding_interval": 8, "kv_padding_interval": 32},
}

Case = tuple[Path, dict[str, Path], list[tuple[str, Expected]]]


@pytest.fixture(scope="session")
def cases(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Case]:
    """Return a family's folder, two adapters, and peft's answers with each and none; made once."""
    made: dict[str, Case] = {}

    def of(family: str) -> Case:
        if family not in made:
            folder = folder_of(family)
            narrow = {"target_modules": ["q_proj", "v_proj"]} | TARGETS[family]
            adapters = {
                "a": save_adapter(folder, tmp_path_factory.mktemp("a"), 1, **TARGETS[family]),
                "b": save_adapter(
                    folder, tmp_path_factory.mktemp("b"), 2, r=7, lora_alpha=16, **narrow
                ),
            }
            wanted = [
                (name, one)
                for name in ("a", "b", "")
                for one in peft_answers(folder, adapters.get(name), family, SIZES)
            ]
            made[family] = (folder, adapters, wanted)
        return made[family]

    return of


def engine_of(
    path: str, folder: Path, adapters: dict[str, Path], **changes: object
) -> CollectingEngine:
    """Load an engine; of `graphs`, every padded step reads static inputs and adapters in slots."""
    engine = engine_with(folder, adapters, **(changes | PATHS[path]))
    if path == "graphs":
        runner: Any = engine.runner
        info = runner.info
        runner.graphs = GraphRunner(runner.forward, info.config, info.max_model_len, fake_capture)
    return engine


def check_replays(engine: CollectingEngine) -> None:
    graphs = getattr(engine.runner, "graphs", None)
    if graphs is not None:
        assert any(shape.is_adapted for shape in graphs.shapes)
        assert graphs.num_replays > graphs.num_captured


@pytest.mark.parametrize("family", TARGETS)
def test_the_expected_answers_differ_by_adapter(family: str, cases: Callable[[str], Case]) -> None:
    _, _, wanted = cases(family)
    assert len({one.answer for _, one in wanted}) == len(wanted)
    by_prompt: dict[tuple[int, ...], int] = {}
    for _, one in wanted:
        by_prompt[one.prompt] = by_prompt.get(one.prompt, 0) + 1
    assert max(by_prompt.values()) > 1, "no prompt is asked twice: equal answers would go unnoticed"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", TARGETS)
def test_a_batch_of_several_adapters_answers_as_peft_does(
    family: str, path: str, cases: Callable[[str], Case]
) -> None:
    folder, adapters, wanted = cases(family)
    with engine_of(path, folder, adapters) as engine:
        order = random.Random(f"{family}{path}").sample(wanted, len(wanted))
        assert run(engine, order) == [one.answer for _, one in order]
        check_replays(engine)


@pytest.mark.parametrize("seed", long_unless({0, 1}, range(4)))
@pytest.mark.parametrize("path", PATHS)
def test_any_schedule_gives_peft_s_tokens(
    path: str, seed: int, cases: Callable[[str], Case]
) -> None:
    draw = random.Random(seed)
    folder, adapters, wanted = cases(draw.choice(["llama", "gemma3"]))
    changes: dict[str, object] = {
        "max_num_batched_tokens": draw.choice([3, 16, 64]),
        "num_blocks": draw.choice([24, 60, 200]),
        "max_loras": draw.choice([1, 2]),
        "max_num_seqs": draw.choice([2, 5, 9]),
        "speculative_tokens": draw.choice([0, 3]),
        "policy": draw.choice(["fifo", "prefill_first", "priority"]),
        "cpu_offload_gib": draw.choice([0.0, 0.001]),
        "safety_margin": 0.0,
    }
    with engine_of(path, folder, adapters, **changes) as engine:
        for _ in range(2):  # the second time over a warm prefix cache
            order = draw.sample(wanted, len(wanted))
            assert run(engine, order, join_every=draw.choice([0, 1, 3])) == [
                one.answer for _, one in order
            ]
        stats = engine.stats()
        check_replays(engine)
    assert stats.failed_steps == 0


def test_steps_launched_ahead_give_peft_s_tokens(cases: Callable[[str], Case]) -> None:
    folder, adapters, wanted = cases("llama")
    with engine_with(folder, adapters, async_batching=True, max_num_batched_tokens=32) as engine:
        assert engine.runner.info.is_asynchronous
        assert run(engine, wanted) == [one.answer for _, one in wanted]


@pytest.mark.parametrize("path", PATHS)
def test_an_adapted_head_scores_the_prompt(path: str, cases: Callable[[str], Case]) -> None:
    """Rows of scored prompt tokens reach the head before the sampled row of their sequence."""
    folder, adapters, wanted = cases("llama")
    chosen = wanted[1:3]
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=len(one.answer), ignore_eos=True, lora=name,
            prompt_logprobs=top,
        )
        for (name, one), top in zip(chosen, (0, None), strict=True)
    ]  # fmt: skip
    with engine_of(path, folder, adapters, max_num_batched_tokens=48) as engine:
        outputs = engine.generate_batch([one.prompt for _, one in chosen], params)
        assert engine.stats().failed_steps == 0  # of a failed step each request is tried alone
    assert [output.token_ids for output in outputs] == [one.answer for _, one in chosen]
