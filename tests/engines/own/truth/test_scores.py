"""Log-probabilities of prompts and of given answers beside one forward pass of Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engines.own.truth import expected, tiny_models
from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import SamplingParams, TokenLogprob
from tokenmill_worker.contract.requests import Prompt
from tokenmill_worker.engines.own import EngineConfig, GenerationRequest

TOLERANCE = 1e-4
NUM_TOP = 3
SCORED = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, prompt_logprobs=NUM_TOP)
PLAIN = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + i * 7 + i * i) % (tiny_models.VOCAB - 3) for i in range(length)]


PROMPTS = [prompt(i, length) for i, length in enumerate((5, 40, 17, 33, 60, 9, 1, 48))]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    """One model of full attention, one with sliding windows beside it."""
    return folder_of(request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> transformers.PreTrainedModel:
    return expected.load(folder)


def engine_of(folder: Path, **changes: Any) -> CollectingEngine:
    settings: dict[str, Any] = {
        "model": str(folder), "dtype": "float32", "device": "cpu", "num_blocks": 256,
        "block_size": 8, "max_num_batched_tokens": 48, "max_num_seqs": 8, "num_threads": 1,
    }  # fmt: skip
    return CollectingEngine.load(EngineConfig(**(settings | changes)))


@torch.inference_mode()
def assert_true(
    model: transformers.PreTrainedModel,
    ids: list[int],
    first: int,
    found: Sequence[TokenLogprob],
    num_top: int,
) -> None:
    """Compare the log-probabilities of tokens `first` and after with those of one pass."""
    logits = model(torch.tensor([ids])).logits[0]
    wanted = logits.log_softmax(-1)
    assert len(found) == len(ids) - first
    for position, entry in enumerate(found, first):
        row = wanted[position - 1]
        assert entry.logprob == pytest.approx(float(row[ids[position]]), abs=TOLERANCE)
        best = row.topk(num_top).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=TOLERANCE)
        assert [float(row[token]) for token, _ in entry.top] == pytest.approx(best, abs=TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"enable_chunked_prefill": False, "max_model_len": 96, "max_num_batched_tokens": 96},
        {"async_batching": True, "max_num_batched_tokens": 20},
    ],
    ids=["one step", "small chunks", "whole prompts", "one step ahead"],
)
def test_scored_prompts_over_a_warm_cache_equal_transformers(
    folder: Path, model: transformers.PreTrainedModel, changes: dict[str, Any]
) -> None:
    engine = engine_of(folder, **changes)
    plain = engine.generate_batch(PROMPTS, PLAIN)
    for _ in range(2):  # the second time, with everything in the cache
        outputs = engine.generate_batch(PROMPTS, SCORED)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        for ids, output in zip(PROMPTS, outputs, strict=True):
            assert_true(model, ids, 1, output.prompt_logprobs, NUM_TOP)


@pytest.mark.parametrize("offload", [0.0, 0.01])
def test_scored_prompts_that_are_preempted_equal_transformers(
    folder: Path, model: transformers.PreTrainedModel, offload: float
) -> None:
    engine = engine_of(
        folder, num_blocks=16, cpu_offload_gib=offload, safety_margin=0.0, max_num_batched_tokens=16
    )
    params = [
        SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, prompt_logprobs=NUM_TOP)
    ] * len(PROMPTS)
    outputs = engine.generate_batch(PROMPTS, params)
    assert engine.stats().preemptions > 0
    for ids, output in zip(PROMPTS, outputs, strict=True):
        assert_true(model, ids, 1, output.prompt_logprobs, NUM_TOP)


def test_only_the_first_choice_has_prompt_log_probabilities(folder: Path) -> None:
    engine = engine_of(folder)
    params = SamplingParams(max_tokens=2, n=2, seed=1, prompt_logprobs=0)
    output = engine.generate_batch([PROMPTS[2]], params)[0]
    assert [len(choice.prompt_logprobs) for choice in output.choices] == [16, 0]


def test_scores_of_given_answers_equal_transformers(
    folder: Path, model: transformers.PreTrainedModel
) -> None:
    """Nothing is drawn; the prompt is computed once, but for what follows its last whole block."""
    engine = engine_of(folder, max_num_batched_tokens=32)
    given = tuple(tuple(prompt(50 + i, length)) for i, length in enumerate((1, 7, 20, 3)))
    start = prompt(7, 61)
    name = engine.add_request(
        start, SamplingParams(n=len(given), logprobs=2, max_tokens=1), given=given
    )
    output = engine.result(name)
    for choice, ids in zip(output.choices, given, strict=True):
        assert choice.token_ids == ids
        assert choice.logprobs is not None
        assert_true(model, [*start, *ids], len(start), choice.logprobs, 2)
    stats = engine.stats()
    assert stats.generated_tokens == 0
    unit = math.lcm(*engine.runner.info.cache_config.block_sizes)
    shared = (len(start) - 1) // unit * unit
    assert stats.computed_tokens == shared + sum(len(start) - shared + len(ids) for ids in given)


def test_an_answer_given_in_part_before_continues_with_the_same_values(folder: Path) -> None:
    engine = engine_of(folder)
    given = tuple(prompt(60, 12))
    params = SamplingParams(logprobs=True)
    requests = [
        GenerationRequest(request_id="a", prompt=Prompt(tuple(prompt(8, 30))), params=params,
                          given=(given,), resumed=resumed)
        for resumed in ((), (given[:5],))
    ]  # fmt: skip
    found = []
    for request in requests:
        engine.submit([request])
        logprobs: list[TokenLogprob] = []
        while engine.has_work:
            for event in engine.step():
                logprobs += event.logprobs or ()
        found.append([entry.logprob for entry in logprobs])
    assert found[1] == pytest.approx(found[0][5:], abs=TOLERANCE)
