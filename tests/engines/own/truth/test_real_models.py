"""Greedy float32 output is that of Transformers on the real models that the tests can load."""

from __future__ import annotations

import functools
import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import transformers

from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.truth import expected
from tests.support.collecting_engine import CollectingEngine
from tests.support.marks import LONG, long_unless
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.model.model_files import ModelNotFoundError, resolve

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

Prompt = tuple[tuple[int, ...], int]  # its tokens, and how many to generate
Lag = Callable[[tuple[int, ...], tuple[int, ...]], float]

TEXT = (
    "The old lighthouse keeper counted the ships every evening, and wrote their names into a book "
    "that nobody but the "
    "gulls had ever read. In the village they said that he had once been a mathematician. def "
    "count(ships): total = 0 "
    "\nfor ship in ships: total += ship.masts\nreturn total\n1, 1, 2, 3, 5, 8, 13, 21, 34 - which "
    "number comes next? "
    "Il pleuvait sur la ville, et les lampes des cafés brillaient dans les flaques. Water boils "
    "at a lower temperature "
    "on a mountain because the pressure of the air is lower there; therefore an egg takes longer. "
    "Dear Sir or Madam, I "
    "am writing to you about the parcel that has not arrived. Once upon a time there were three "
    "questions: who, where, "
    "and above all why. The capital of Norway is Oslo, the capital of Peru is"
)


def folder_of(name: str) -> Path:
    try:
        return resolve(name)
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def ask(engine: CollectingEngine, prompt: tuple[int, ...], max_tokens: int) -> str:
    return engine.add_request(
        prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    )


def answers_of(
    engine: CollectingEngine, prompts: Sequence[Prompt], steps_between: list[int]
) -> list[tuple[int, ...]]:
    ids = []
    for (prompt, max_tokens), steps in zip(prompts, steps_between, strict=True):
        ids.append(ask(engine, prompt, max_tokens))
        for _ in range(steps):
            engine.step()
    outputs = [engine.result(request_id) for request_id in ids]
    check_integrity(engine.scheduler)
    return [output.token_ids for output in outputs]


def check(lag: Lag, prompts: Sequence[Prompt], answers: Sequence[tuple[int, ...]]) -> None:
    """Check that each answer is the greedy one and has the length that was asked for."""
    for (prompt, max_tokens), answer in zip(prompts, answers, strict=True):
        assert len(answer) == max_tokens
        assert lag(prompt, answer) < expected.LEAST_GAP


def test_smollm2_answers_prompts_that_join_at_different_steps(
    smollm2: tuple[Path, list[Prompt], Lag],
) -> None:
    folder, prompts, lag = smollm2
    draw = random.Random(3)
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", attention="cpu",
        num_blocks=600,
        max_num_batched_tokens=96, max_num_seqs=24,
    )  # fmt: skip
    with CollectingEngine.load(config) as engine:
        steps = [draw.choice((0, 0, 1, 3)) for _ in prompts]
        check(lag, prompts, answers_of(engine, prompts, steps))
        assert engine.stats().finished == len(prompts)


@pytest.mark.usefixtures("linear_kernels")
def test_weights_kept_in_their_file_s_format_change_no_bit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SmolLM2's file holds blocks of 4 bits, its embedding blocks of 8."""
    folder = folder_of("smollm2-135m-instruct")
    prompts = [list(range(100 + n, 100 + 3 * n)) for n in (1, 5, 30, 41)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, top_logprobs=20)
    answers = []
    for narrow in (True, False):
        config = EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            attention="cpu",
            num_blocks=100,
            narrow_weights=narrow,
            verify_model=False,
            amx=False,
        )
        with caplog.at_level(logging.INFO), CollectingEngine.load(config) as engine:
            answers.append(
                [
                    (one.token_ids, one.logprobs)
                    for one in engine.generate_batch(prompts, [params] * 4)
                ]
            )
    assert answers[0] == answers[1]
    logged = [
        record.getMessage() for record in caplog.records if "same bits" in record.getMessage()
    ]
    assert logged == [
        "Weights in memory, each the same bits as in float32: 106.2 million as 4 bits, 28.3 "
        "million as 8 bits",
        "Weights in memory, each the same bits as in float32: 134.5 million as float32",
    ]


def lag_of(folder: Path) -> Lag:
    """Return `expected.lag` of the folder's model, which computes no answer twice."""
    return functools.cache(functools.partial(expected.lag, expected.load(folder)))


@pytest.fixture(scope="module")
def smollm2(rounds: int) -> tuple[Path, list[Prompt], Lag]:
    folder = folder_of("smollm2-135m-instruct")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    draw = random.Random(1)
    prompts: list[Prompt] = []
    for _ in range(30 if rounds >= LONG else 12):
        start, length = draw.randrange(len(ids) - 2), draw.choice((1, 3, 8, 20, 50, 120))
        prompts.append((tuple(ids[start : start + length]), draw.choice((1, 2, 5, 9, 16, 24))))
    return folder, prompts, lag_of(folder)


@pytest.fixture(scope="module")
def gemma3_ids() -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder_of("gemma3-270m"))
    ids: list[int] = tokenizer(" ".join([TEXT] * 9))["input_ids"]
    return ids


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Lag]]:
    """Return a function that gives a model with the same weights and a window of so many tokens
    instead of 512.
    """

    @functools.cache
    def of(window: int) -> tuple[Path, Lag]:
        folder, original = tmp_path_factory.mktemp("gemma3"), folder_of("gemma3-270m")
        for path in original.iterdir():
            (folder / path.name).symlink_to(path)
        settings = json.loads((original / "config.json").read_text()) | {"sliding_window": window}
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(settings))
        return folder, lag_of(folder)

    return of


def make_gemma(folder: Path, **changes: object) -> CollectingEngine:
    settings: dict[str, object] = {
        "model": str(folder), "dtype": "float32", "device": "cpu", "attention": "cpu", "fuse": True,
        "num_blocks": 420, "max_num_batched_tokens": 200, "max_num_seqs": 8,
    }  # fmt: skip
    return CollectingEngine.load(EngineConfig(**{**settings, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", long_unless({32}, [32, 512]))
def test_gemma3_answers_prompts_around_and_far_beyond_its_window(
    gemma3: Callable[[int], tuple[Path, Lag]], gemma3_ids: list[int], window: int
) -> None:
    folder, lag = gemma3(window)
    lengths = (5, window - 4, window + 3, 2 * window + 76)
    prompts = [(tuple(gemma3_ids[:length]), 8) for length in lengths]
    with make_gemma(folder) as engine:
        assert [group.window for group in engine.runner.info.cache_config.groups] == [
            Window(window),
            None,
        ]
        check(lag, prompts, answers_of(engine, prompts, [2] * len(prompts)))


def test_gemma3_writes_an_answer_that_crosses_its_window_several_times(
    gemma3: Callable[[int], tuple[Path, Lag]], gemma3_ids: list[int], rounds: int
) -> None:
    folder, lag = gemma3(32)
    prompt, length, num_blocks = tuple(gemma3_ids[:30]), 70, 12
    if rounds >= LONG:
        length, num_blocks = 160, 17
    with make_gemma(folder, num_blocks=num_blocks, verify_model=False) as engine:
        output = engine.result(ask(engine, prompt, length))
        assert engine.capacity().free_blocks == num_blocks, "blocks that a window passed come back"
    check(lag, [(prompt, length)], [output.token_ids])
