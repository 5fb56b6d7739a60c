"""A model with recurrent layers: failed steps, several choices, refused settings."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.config import EngineConfigError

PROMPTS = [tuple(range(3, 3 + length)) for length in (5, 30, 12)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def folder(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("qwen3_5")


def load(folder: Path, **changes: Any) -> CollectingEngine:
    settings: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return CollectingEngine.load(
        EngineConfig(model=str(folder), dtype="float32", device="cpu", **{**settings, **changes})
    )


def answers(
    engine: CollectingEngine, prompts: list[tuple[int, ...]], params: SamplingParams
) -> list[Any]:
    outputs = engine.generate_batch(prompts, params)
    assert {output.error for output in outputs} == {None}
    return [choice.token_ids for output in outputs for choice in output.choices]


def test_a_failed_step_is_repeated_from_the_recurrent_states_before_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder) as engine:
        expected = answers(engine, PROMPTS, GREEDY)
        runner: Any = engine.runner
        own, calls = runner.forward, iter(range(1000))

        def forward(inputs: Any) -> Any:
            logits = own(inputs)
            if next(calls) in (2, 9):
                raise RuntimeError("no memory for the logits")
            return logits

        monkeypatch.setattr(runner, "forward", forward)
        assert answers(engine, PROMPTS, GREEDY) == expected
        assert engine.stats().failed_steps == 2


def test_choices_and_equal_prompts_have_their_own_states(folder: Path) -> None:
    seeded = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=8, ignore_eos=True)
    with load(folder) as engine:
        first, second = answers(engine, PROMPTS[1:2], seeded)
        assert first != second
        assert answers(engine, PROMPTS[1:2] * 2, seeded) == [first, second] * 2
        assert engine.stats().cached_tokens == 0


def test_settings_incompatible_with_recurrent_states_are_refused(folder: Path) -> None:
    words = "cannot be served with speculative_tokens, cpu_offload_gib: some of its layers keep"
    with pytest.raises(EngineConfigError, match=words):
        load(folder, speculative_tokens=3, cpu_offload_gib=0.01)


def test_prompts_with_the_same_start_continue_from_a_checkpoint(folder: Path) -> None:
    """The second prompt finds the blocks of the first, but no states at their end: it leaves them
    there for the third. A repeated prompt finds those of its own end.
    """
    start = tuple(3 + 7 * i % 250 for i in range(100))
    prompts = [start + tuple(range(10 * i, 10 * i + 40)) for i in range(1, 4)]
    with load(folder, prefix_cache=False) as engine:
        expected = [answers(engine, [prompt], GREEDY) for prompt in prompts]
    with load(folder) as engine:
        found, cached = [], []
        for prompt in [*prompts, prompts[0]]:
            before = engine.stats().cached_tokens
            found.append(answers(engine, [prompt], GREEDY))
            cached.append(engine.stats().cached_tokens - before)
        assert found == [*expected, expected[0]]
        assert cached == [0, 0, 96, 128]


def test_state_checkpoints_are_replaced_by_newer_ones_and_survive_preemption_and_faults(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(3)
    starts = [tuple(draw.randrange(3, 250) for _ in range(80)) for _ in range(6)]
    prompts = [
        draw.choice(starts) + tuple(draw.randrange(3, 250) for _ in range(draw.randrange(1, 40)))
        for _ in range(24)
    ]
    with load(folder, prefix_cache=False) as engine:
        expected = answers(engine, prompts, GREEDY)
    with load(folder, num_blocks=22, max_num_batched_tokens=48, safety_margin=0.0) as engine:
        runner: Any = engine.runner
        own, calls = runner._sampler.sample, iter(range(1000))

        def sample(*arguments: Any) -> Any:
            if next(calls) % 9 == 4:
                raise RuntimeError("no memory for the tokens")
            return own(*arguments)

        monkeypatch.setattr(runner._sampler, "sample", sample)
        assert answers(engine, prompts, GREEDY) == expected
        stats = engine.stats()
        assert min(stats.cached_tokens, stats.preemptions, stats.failed_steps) > 2
