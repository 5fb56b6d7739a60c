"""A draft model changes no token, saves steps where its drafts are right, and stops where not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.truth import tiny_models
from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.execution.runner import ModelRunner
from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sampling import DraftGain
from tokenmill_worker.engines.own.sequence import Sequence

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
LENGTHS = (5, 40, 17, 33, 60, 9, 25, 48)

Tokens = list[list[tuple[int, ...]]]


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + i * 7 + i * i) % (tiny_models.VOCAB - 3) for i in range(length)]


def engine_of(folder: Path, draft: Path | None = None, **changes: object) -> CollectingEngine:
    """Load an engine whose draft model costs nothing, so that no clock decides what it drafts."""
    settings: dict[str, object] = {
        "model": str(folder), "device": "cpu", "block_size": 8, "num_blocks": 256,
        "max_num_batched_tokens": 64, "max_num_seqs": 8, "num_threads": 1, "verify_model": False,
    }  # fmt: skip
    if draft is not None:
        settings |= {"draft_model": str(draft), "speculative_tokens": 4}
    engine = CollectingEngine.load(EngineConfig(**(settings | changes)))  # type: ignore[arg-type]
    if draft is not None:
        drafts_of(engine).gain = DraftGain(clock=lambda: 0.0)
    return engine


def drafts_of(engine: CollectingEngine):
    assert isinstance(engine.runner, ModelRunner)
    assert engine.runner.draft_model is not None
    return engine.runner.draft_model


def cut(folder: Path, into: Path, num_layers: int = 2) -> Path:
    """Save the first layers of a model as a model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:num_layers]
    model.save_pretrained(into)
    return into


def answers(
    engine: CollectingEngine, prompts: list[list[int]], params: list[SamplingParams]
) -> Tokens:
    outputs = engine.generate_batch(prompts, params)
    check_integrity(engine.scheduler)
    return [[choice.token_ids for choice in output.choices] for output in outputs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_model_accepts_all_drafts_of_itself(llama: Path, params: SamplingParams) -> None:
    prompts = [prompt(1, 20), prompt(2, 9)]
    plain, engine = engine_of(llama), engine_of(llama, llama)
    assert answers(engine, prompts, [params] * 2) == answers(plain, prompts, [params] * 2)
    stats = engine.stats()
    assert stats.accepted_tokens == stats.draft_tokens
    # a prompt, then a step without drafts, which measures, then five tokens a step
    assert stats.steps <= 3 + 24 / 5 + 1
    assert plain.stats().steps == 24


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_drafts_of_a_cut_model_change_no_token(
    family: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Beside preemption, offload, cached prefixes, several choices, and layers with windows."""
    folder = folder_of(family)
    prompts = [prompt(3, 16) + prompt(i, length) for i, length in enumerate(LENGTHS)]
    params = [
        msgspec.structs.replace(SEEDED, n=2) if i % 3 == 0 else GREEDY for i in range(len(prompts))
    ]
    engine = engine_of(
        folder, cut(folder, tmp_path), num_blocks=28, cpu_offload_gib=0.01, safety_margin=0.0
    )
    wanted = answers(engine_of(folder, prefix_cache=False), prompts, params)
    assert answers(engine, prompts, params) == answers(engine, prompts, params) == wanted
    stats = engine.stats()
    assert min(stats.preemptions, stats.blocks_swapped_in, stats.cached_tokens) > 0
    assert min(drafts_of(engine).num_passes, stats.draft_tokens) > 50
    assert stats.blocks_free == stats.blocks_total


def test_the_draft_model_computes_a_shared_prefix_once(llama: Path) -> None:
    """The second request finds the draft model's keys and values in the blocks that it shares."""
    engine = engine_of(llama, llama)
    computed = []
    run = drafts_of(engine)._pass

    def counted(items, drafted):
        computed.append(sum(item.num_tokens for item in items))
        run(items, drafted)

    drafts_of(engine)._pass = counted
    counts = []
    for _ in range(3):  # the first one draft less: its steps are measured
        computed.clear()
        answers(engine, [prompt(4, 60)], [GREEDY])
        counts.append(max(computed))
    assert counts[0] > 56
    assert counts[1:] == [pytest.approx(4, abs=4)] * 2


def test_drafts_that_are_never_accepted_stop(llama: Path, tmp_path: Path) -> None:
    other = tiny_models.save("llama", tmp_path, seed=7)
    engine = engine_of(llama, other)
    long = msgspec.structs.replace(GREEDY, max_tokens=180)
    answers(engine, [prompt(1, 9)], [long])
    assert 0 < drafts_of(engine).num_passes < 30
    assert engine.stats().accepted_tokens == 0


def test_drafts_that_cost_more_than_they_gain_stop_for_all(llama: Path, tmp_path: Path) -> None:
    """The clock gains a second with every reading, so drafting takes as long as a step."""
    other = tiny_models.save("llama", tmp_path, seed=7)
    engine = engine_of(llama, other)
    drafts_of(engine).gain = DraftGain(clock=map(float, itertools.count()).__next__)
    for seed in range(8):
        answers(engine, [prompt(seed, 9)], [GREEDY])
    # of more than 100 by the limits of eight sequences
    assert 0 < drafts_of(engine).num_passes < 24


def test_drafting_does_not_change_a_sequence_s_tokens(llama: Path) -> None:
    engine = engine_of(llama, llama)
    drafts, changed = drafts_of(engine), list[int]()
    run, num_passes = drafts._run, list[int]()

    def watched(wanted: dict[Sequence, int], items: list[ScheduledSequence]) -> Any:
        before = {sequence: list(sequence.token_ids) for sequence in wanted}
        found = run(wanted, items)
        changed.extend(seq.num_tokens for seq, ids in before.items() if seq.token_ids != ids)
        num_passes.append(max(wanted.values(), default=0))
        return found

    drafts._run = watched
    answers(engine, [prompt(1, 20), prompt(2, 9)], [GREEDY] * 2)
    assert max(num_passes) > 1
    assert changed == []


def test_requests_continue_without_drafts_after_the_draft_model_failed(llama: Path, caplog) -> None:
    engine = engine_of(llama, llama)

    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    drafts_of(engine)._pass = broken
    wanted = answers(engine_of(llama), [prompt(1, 20)], [GREEDY])
    assert answers(engine, [prompt(1, 20)], [GREEDY]) == wanted
    assert caplog.text.count("it drafts no more") == 1


def test_a_draft_model_that_does_not_fit_is_refused(
    llama: Path, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    config = transformers.AutoConfig.from_pretrained(llama, vocab_size=300, num_hidden_layers=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(EngineConfigError, match="vocabulary has 300 tokens, the model's 320"):
        engine_of(llama, tmp_path)
    with pytest.raises(EngineConfigError, match="no layer of the model attends to all"):
        engine_of(folder_of("mistral"), llama)
    with pytest.raises(EngineConfigError, match="nothing without speculative_tokens"):
        EngineConfig(model="any", draft_model="other")
    config = EngineConfig(model="any", draft_model="other", speculative_tokens=4)
    for name, value in (("async_batching", True), ("max_read_tokens", 9)):
        with pytest.raises(EngineConfigError, match=f"draft_model cannot be used with {name}"):
            config.replace(**{name: value})
