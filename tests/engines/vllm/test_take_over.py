"""Answers that another engine goes on with in mid-sentence: vLLM's by vLLM, by ours, ours by vLLM.

By the protocol alone, for many places of a cut; `test_kills.py` kills workers.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from tokenizers import Tokenizer

from tests.engines.conformance.conftest import MODEL, start_of_kind
from tests.engines.conformance.driver import EngineUnderTest, ReportedChoice
from tests.engines.vllm.schemas import SCHEMAS
from tests.support.vllm import VLLM, needs_vllm, with_vllm
from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.own.model.model_files import resolve
from tokenmill_worker.engines.process.host import CHILD_MODULE

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(3_000), needs_vllm]

PLACES = 16
LENGTH = 80
QUESTIONS = ("Tell me of the rivers of Europe.", "Write a short letter to a friend.")
PAIRS = [("vllm", "vllm"), ("vllm", "own"), ("own", "vllm")]
ALL_CUTS, FEW_CUTS = 50, 3  # places of each schema where an answer is cut
_numbers = itertools.count()


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineUnderTest]]:
    """One engine of each kind, with the same model."""
    found = {}
    try:
        for kind in ("own", "vllm"):
            start = start_of_kind(kind)
            settings = {**start.settings, "max_num_seqs": PLACES}
            python, environment = sys.executable, None
            if kind == "vllm":
                python, environment = str(VLLM), with_vllm(os.environ)  # noqa: TID251
            found[kind] = EngineUnderTest(
                [python, "-m", CHILD_MODULE],
                msgspec.structs.replace(start, settings=settings),
                environment,
            )
        for engine in found.values():
            engine.ready()
        yield found
    finally:
        for engine in found.values():
            engine.kill()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Tokenizer.from_file(str(Path(resolve(MODEL)) / "tokenizer.json"))


@pytest.fixture(scope="module")
def ask(tokenizer: Any) -> Callable[..., GenerationRequest]:
    """Make a greedy request: `ask(QUESTION, resumed=TOKENS, PARAMETER=VALUE, …)`."""

    def made(question: str, *, resumed: list[int] | None = None, **params: Any) -> Any:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        values = {"max_tokens": LENGTH, "temperature": 0.0, **params}
        return GenerationRequest(
            request_id=f"t{next(_numbers)}",
            prompt=Prompt(tuple(tokenizer.encode(text).ids)),
            params=SamplingParams(**values),
            resumed=(tuple(resumed),) if resumed else (),
        )

    return made


def assert_goes_on(
    first: EngineUnderTest,
    then: EngineUnderTest,
    made: Callable[..., GenerationRequest],
    cuts: range,
) -> ReportedChoice:
    """Compare what `then` answers behind each cut with the rest of the whole answer of `first`."""
    (whole,) = first.answer(made(), 300)
    tokens = whole.token_ids
    places = [cut for cut in cuts if cut < len(tokens)]
    rests = then.answer_all([made(resumed=tokens[:cut]) for cut in places], 600)
    assert len(places) >= 5, f"the answer has {len(tokens)} tokens"
    for cut, (rest,) in zip(places, rests, strict=True):
        assert rest.token_ids == tokens[cut:], f"cut behind {cut} tokens"
        assert rest.finish_reason is whole.finish_reason
    return whole


@pytest.mark.parametrize(("first", "then"), PAIRS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_greedy_answer_goes_on_as_undisturbed_behind_any_token(
    engines: dict[str, EngineUnderTest], ask: Any, first: str, then: str, question: str
) -> None:
    whole = assert_goes_on(
        engines[first],
        engines[then],
        lambda **more: ask(question, ignore_eos=True, **more),
        range(1, LENGTH, 5),
    )
    assert len(whole.token_ids) == LENGTH


@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_a_greedy_answer_of_a_schema_goes_on_as_undisturbed_behind_any_token(
    engines: dict[str, EngineUnderTest], tokenizer: Any, ask: Any, first: str, then: str
) -> None:
    schema = SCHEMAS["a person"]
    whole = assert_goes_on(
        engines[first],
        engines[then],
        lambda **more: ask(
            "Describe a poet.",
            **{"response_format": ResponseFormat(json_schema=schema), "max_tokens": 200, **more},
        ),
        range(1, 200, 3),
    )
    jsonschema.validate(json.loads(tokenizer.decode(whole.token_ids)), schema)


LIMITS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "max_tokens": lambda _: {"max_tokens": 33, "ignore_eos": True},
    "a stop id": lambda plain: {"stop_token_ids": (_first_in_the_middle(plain),)},
    "min_tokens before a stop id": lambda plain: {
        "stop_token_ids": (plain[3],),
        "min_tokens": 30,
    },
    "min_tokens before the model's end": lambda _: {"min_tokens": 70},
    "a frequency penalty": lambda _: {"frequency_penalty": 0.8, "ignore_eos": True},
    "a negative frequency penalty": lambda _: {"frequency_penalty": -0.1, "ignore_eos": True},
    "a repetition penalty": lambda _: {"repetition_penalty": 1.2, "ignore_eos": True},
}


def _first_in_the_middle(tokens: list[int]) -> int:
    return next(
        token for place, token in enumerate(tokens) if place >= 40 and token not in tokens[:place]
    )


@pytest.mark.parametrize(("first", "then"), PAIRS)
@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_counts_as_if_undisturbed_over_a_cut(
    engines: dict[str, EngineUnderTest], ask: Any, first: str, then: str, limit: str
) -> None:
    question = QUESTIONS[0]
    (plain,) = engines["own"].answer(ask(question, ignore_eos=True))
    params = LIMITS[limit](plain.token_ids)
    assert_goes_on(
        engines[first], engines[then], lambda **more: ask(question, **params, **more),
        range(1, LENGTH, 7),
    )  # fmt: skip


def cut_answers(
    engine: EngineUnderTest, made: Callable[..., GenerationRequest], count: int
) -> list[list[int]]:
    """Return the beginnings of drawn answers, cut behind so many different tokens in all."""
    found: list[list[int]] = []
    for seed in itertools.count(0, PLACES):
        answers = engine.answer_all([made(seed=seed + place) for place in range(PLACES)], 600)
        for (whole,) in answers:
            assert whole.finish_reason is FinishReason.STOP, whole
            found += [whole.token_ids[:cut] for cut in range(1, len(whole.token_ids))]
        different = {tuple(beginning) for beginning in found}
        if len(different) >= count:
            return [list(one) for one in random.Random(0).sample(sorted(different), count)]
    raise AssertionError("unreachable")


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_of_a_schema_is_valid_behind_any_cut(
    engines: dict[str, EngineUnderTest], tokenizer: Any, ask: Any, name: str, rounds: int
) -> None:
    """Cut behind 50 places of each schema if `--rounds` is at least 50, else behind three."""
    schema = SCHEMAS[name]
    count = ALL_CUTS if rounds >= ALL_CUTS else FEW_CUTS
    params = {
        "response_format": ResponseFormat(json_schema=schema),
        "max_tokens": 300,
        "temperature": 1.0,
    }
    first = engines["vllm" if len(name) % 2 else "own"]
    cuts = cut_answers(first, lambda **more: ask(f"Give me {name}.", **params, **more), count)
    rests = engines["vllm"].answer_all(
        [ask(f"Give me {name}.", resumed=cut, seed=99, **params) for cut in cuts], 1_200
    )
    invalid = []
    for cut, (rest,) in zip(cuts, rests, strict=True):
        text = tokenizer.decode([*cut, *rest.token_ids])
        try:
            assert rest.finish_reason is FinishReason.STOP, (rest.finish_reason, rest.error)
            jsonschema.validate(json.loads(text), schema)
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            invalid.append(f"cut behind {len(cut)} tokens of {text!r}: {error}")
    drawn = sum(len(rest.token_ids) for (rest,) in rests)
    words = f"{name}: {len(cuts)} cuts, {drawn} tokens behind them, {len(invalid)} invalid answers"
    print(words, flush=True)  # noqa: T201
    assert invalid == []
