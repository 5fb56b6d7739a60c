"""Greedy float32 output equals `model.generate` token for token, for many families and many
schedules.

The real scheduler and engine run; prompts of mixed length join at different steps, so that chunks
of some and decodes of others meet in one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.truth import expected, tiny_models
from tests.engines.own.truth.expected import Expected
from tests.engines.own.truth.tiny_models import FAMILIES
from tests.support.collecting_engine import CollectingEngine
from tests.support.marks import long_unless
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.plan import Draft
from tokenmill_worker.engines.own.scheduler import Scheduler
from tokenmill_worker.engines.own.sequence import Sequence

LENGTHS = (1, 3, 17, 40, 65, 30)
ANSWERS = (24, 9, 16, 24, 12, 20)
UNBOUNDED = 4096
# one family for each way to attend; the long form has all
FAST = {"llama", "mistral", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3", "llama4", "qwen3_5"}
NAMES = long_unless(FAST, FAMILIES)
EVERY_CHUNK = [*itertools.product(FAMILIES, (1, 7, UNBOUNDED))]
CHUNKS = [(name, chunk) for name, chunk in EVERY_CHUNK if name in FAST and chunk > 1]
CHUNKS += [("llama", 1), ("gemma3", 1), ("deepseek_v3", 1)]

Answers = tuple[Path, list[Expected]]


@pytest.fixture(scope="session")
def answers(folder_of: Callable[[str], Path]) -> Callable[[str], Answers]:
    """Return a family's folder and the answers of `generate`; made once."""
    made: dict[str, Answers] = {}

    def of(name: str) -> Answers:
        if name not in made:
            folder = folder_of(name)
            model = expected.load(folder, FAMILIES[name].attention)
            pairs = zip(LENGTHS, ANSWERS, strict=True)
            wanted = [
                expected.clear_answer(model, length, count, tiny_models.VOCAB)
                for length, count in pairs
            ]
            made[name] = (folder, wanted)
        return made[name]

    return of


def run(
    engine: CollectingEngine, wanted: list[Expected], join_every: int = 3
) -> list[tuple[int, ...]]:
    """Run the requests, which join one after the other, and return their answers."""
    ids = []
    for one in wanted:
        params = SamplingParams(temperature=0.0, max_tokens=len(one.answer), ignore_eos=True)
        ids.append(engine.add_request(one.prompt, params))
        for _ in range(join_every):
            engine.step()
    outputs = [engine.result(request_id) for request_id in ids]
    assert all(output.error is None for output in outputs)
    check_integrity(engine.scheduler)
    return [output.token_ids for output in outputs]


def make_engine(folder: Path, **changes: object) -> CollectingEngine:
    settings: dict[str, object] = {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "attention": "reference",
        "fuse": False,
        "block_size": 4,
        "num_blocks": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": UNBOUNDED,
    }
    return CollectingEngine.load(EngineConfig(**{**settings, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_expected_answers_differ_and_have_clear_margins(
    name: str, answers: Callable[[str], Answers]
) -> None:
    _, wanted = answers(name)
    assert min(one.gap for one in wanted) > expected.CLEAR_GAP
    assert len({one.answer for one in wanted}) == len(wanted)
    assert max(len(set(one.answer)) for one in wanted) > 4, (
        "a model that repeats itself proves little"
    )


@pytest.mark.parametrize(("name", "chunk"), long_unless(CHUNKS, EVERY_CHUNK))
def test_prefill_chunks_of_any_size_give_generate_s_tokens(
    name: str, chunk: int, answers: Callable[[str], Answers]
) -> None:
    folder, wanted = answers(name)
    with make_engine(folder, max_num_batched_tokens=chunk, safety_margin=0.0) as engine:
        assert len(engine.runner.info.cache_config.groups) == FAMILIES[name].num_groups
        assert run(engine, wanted) == [one.answer for one in wanted]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_several_prompts_in_one_step_give_generate_s_tokens(
    name: str, answers: Callable[[str], Answers]
) -> None:
    folder, wanted = answers(name)
    with make_engine(folder, long_prefill_token_threshold=5, max_num_batched_tokens=32) as engine:
        assert run(engine, wanted, join_every=1) == [one.answer for one in wanted]


@pytest.mark.parametrize(
    ("name", "num_blocks", "offload"),
    [
        ("llama", 28, 0.0),
        ("llama", 28, 0.001),
        ("gemma3", 22, 0.0),
        ("gemma3", 22, 0.001),
        ("gpt_oss", 31, 0.0),
        ("gpt_oss", 31, 0.001),
        ("qwen3_5", 28, 0.0),
    ],
)
def test_preempted_sequences_give_generate_s_tokens(
    name: str, num_blocks: int, offload: float, answers: Callable[[str], Answers]
) -> None:
    folder, wanted = answers(name)
    with make_engine(
        folder, num_blocks=num_blocks, cpu_offload_gib=offload, max_num_batched_tokens=64
    ) as engine:
        assert run(engine, wanted, join_every=0) == [one.answer for one in wanted]
        stats = engine.stats()
        assert stats.preemptions > 0
        assert (stats.blocks_swapped_in > 0) == (offload > 0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "mistral", "llama4", "deepseek_v3"])
def test_cached_prefixes_give_generate_s_tokens(
    name: str, answers: Callable[[str], Answers]
) -> None:
    folder, wanted = answers(name)
    with make_engine(folder) as engine:
        assert run(engine, wanted) == [one.answer for one in wanted]
        assert run(engine, wanted[::-1]) == [one.answer for one in wanted[::-1]]
        assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_fast_path_gives_generate_s_tokens(
    name: str, answers: Callable[[str], Answers]
) -> None:
    folder, wanted = answers(name)
    with make_engine(
        folder, attention="cpu", fuse=True, block_size=16, max_num_batched_tokens=16
    ) as engine:
        assert run(engine, wanted) == [one.answer for one in wanted]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_steps_launched_ahead_give_generate_s_tokens(
    name: str, answers: Callable[[str], Answers]
) -> None:
    folder, wanted = answers(name)
    with make_engine(
        folder, async_batching=True, max_num_batched_tokens=32, num_blocks=40
    ) as engine:
        assert engine.runner.info.is_asynchronous
        assert run(engine, wanted) == [one.answer for one in wanted]


class Oracle:
    """Proposes the tokens that will come; by turns one of them is wrong."""

    def __init__(self, wanted: list[Expected]) -> None:
        self._texts = [one.prompt + one.answer for one in wanted]

    def __call__(self, sequence: Sequence) -> Draft:
        known = tuple(sequence.token_ids)
        text = next(text for text in self._texts if text[: len(known)] == known)
        drafts = list(text[len(known) : len(known) + 3])
        wrong_at = len(known) % 4
        if wrong_at < len(drafts):
            drafts[wrong_at] ^= 1
        return Draft(tuple(drafts))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "llama4"])
def test_right_and_wrong_drafts_change_no_token(
    name: str, answers: Callable[[str], Answers]
) -> None:
    folder, wanted = answers(name)
    runner = make_engine(folder).runner
    scheduler = Scheduler(
        runner.info.config.replace(speculative_tokens=3),
        runner.info.cache_config,
        max_model_len=runner.info.max_model_len,
        eos_token_ids=runner.info.eos_token_ids,
        proposer=Oracle(wanted),
    )
    with CollectingEngine(runner, scheduler) as engine:
        assert run(engine, wanted) == [one.answer for one in wanted]
        stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_prompt_lookup_finds_drafts_and_changes_no_token(answers: Callable[[str], Answers]) -> None:
    folder, wanted = answers("gpt2")
    with make_engine(folder, speculative_tokens=3) as engine:
        assert run(engine, wanted) == [one.answer for one in wanted]
        assert engine.stats().draft_tokens > 0
