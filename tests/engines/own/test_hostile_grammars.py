"""Grammars that cost much end, each alone, with an answer or a sentence: the engine steps on."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.own.sampling.grammar.hostile import KINDS
from tests.support.collecting_engine import CollectingEngine
from tests.support.marks import long_unless
from tests.support.tokenizers import byte_level
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import Prompt
from tokenmill_worker.engines.own import EngineConfig, GenerationRequest

SEEDS = long_unless({0}, range(4))
EACH = 20  # grammars of each kind, for each seed


@pytest.fixture(scope="module")
def engine(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectingEngine]:
    """An engine whose model reads and writes bytes."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    shutil.copytree(llama, folder)
    tokenizer = byte_level()
    tokenizer._tokenizer.save_pretrained(folder)
    (stop,) = tokenizer.eos_token_ids
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": stop}))
    config = EngineConfig(model=str(folder), num_blocks=512, max_num_seqs=32, num_threads=1)
    with CollectingEngine.load(config) as loaded:
        yield loaded


def run(engine: CollectingEngine, requests: list[GenerationRequest]) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    engine.submit(requests)
    while engine.request_ids():
        for event in engine.step():
            events[event.request_id].append(event)
    for event in engine.step():
        events[event.request_id].append(event)
    return events


def witness(name: str) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt=Prompt((72, 105)), params=params)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_hostile_grammar_ends_with_an_answer_or_a_sentence(
    engine: CollectingEngine, kind: str, seed: int
) -> None:
    (alone,) = run(engine, [witness("alone")]).values()
    tokens = [i for event in alone for i in event.token_ids]
    assert len(tokens) == 60
    ends = set()
    draw = random.Random(f"{kind} {seed}")
    wanted = {f"{seed}-{i}": KINDS[kind](draw) for i in range(EACH)}
    requests = [
        GenerationRequest(
            request_id=name,
            prompt=Prompt((72, 105)),
            tenant=draw.choice("ab"),
            params=SamplingParams(
                temperature=draw.choice((0.0, 1.0)),
                seed=seed,
                max_tokens=12,
                response_format=form,
                speculate=draw.random() < 0.7,
                n=draw.choice((1, 1, 2)),
            ),
        )
        for name, form in wanted.items()
    ]
    events = run(engine, [witness("witness"), *requests])
    found = [i for event in events.pop("witness") for i in event.token_ids]
    assert found == tokens, "another request's grammar changes an answer"
    for name, told in events.items():
        last = told[-1]
        assert last.finish_reason is not None, wanted[name]
        ends.add(last.finish_reason)
        if last.finish_reason is FinishReason.ERROR:
            assert last.error_code == "invalid_request", (wanted[name], last.error)
            assert last.error, wanted[name]
            assert "\n" not in last.error, (wanted[name], last.error)
            assert "Traceback" not in last.error
    assert engine.stats().failed_steps == 0
    assert FinishReason.ERROR in ends
    assert FinishReason.LENGTH in ends or FinishReason.STOP in ends
