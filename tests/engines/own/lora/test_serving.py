"""Adapters in a running engine: refusals, versions in the cache, and the cost to plain steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.own.lora.support import engine_with, greedy, save_adapter
from tests.engines.own.scheduler.loop import Loop, make_sequence
from tests.engines.own.truth import tiny_models
from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.requests import Prompt, RequestError
from tokenmill_worker.engines.own import GenerationRequest
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.cuda.graphs import CapturedGraph, GraphRunner
from tokenmill_worker.engines.own.lora.batch import AdapterBatch
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepPlan

PROMPT = [3 + (i * 7 + i * i) % (tiny_models.VOCAB - 3) for i in range(33)]
FUSED: dict[str, object] = {"attention": "cpu", "fuse": True, "block_size": 16}


@pytest.fixture(scope="module")
def four(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_adapter(llama, tmp_path_factory.mktemp(name), seed)
        for seed, name in enumerate("abcd")
    }


def ask(engine: CollectingEngine, lora: str = "", prompt: list[int] = PROMPT) -> tuple[int, ...]:
    (output,) = engine.generate_batch([prompt], greedy(8, lora))
    assert output.error is None
    return output.token_ids


def cached(engine: CollectingEngine, lora: str) -> int:
    return engine.generate_batch([PROMPT], greedy(2, lora))[0].num_cached_tokens


def test_a_request_for_an_unknown_adapter_is_refused(llama: Path, four: dict[str, Path]) -> None:
    refusal = pytest.raises(RequestError, match="adapter 'poet' is not served here; there are a, b")
    with engine_with(llama, {"a": four["a"], "b": four["b"]}) as engine, refusal:
        engine.generate_batch([PROMPT], greedy(4, "poet"))
    with engine_with(llama, {}) as engine:
        request = GenerationRequest(
            request_id="r", prompt=Prompt(tuple(PROMPT)), params=greedy(4, "a")
        )
        engine.submit([request])
        [event] = engine.step()
    assert event.finish_reason is FinishReason.ERROR
    assert event.error == "adapter 'a' is not served here; there are none"


def test_all_bad_adapters_are_reported_together_at_the_start(
    llama: Path, tmp_path: Path, four: dict[str, Path]
) -> None:
    with pytest.raises(EngineConfigError) as refusal:
        engine_with(
            llama,
            {"good": four["a"], "gone": tmp_path / "gone", "empty": tmp_path},
            max_cached_loras=4,
        )
    assert len(refusal.value.problems) == 2
    assert "adapter 'gone' cannot be used: there is no folder" in refusal.value.problems[0]


def test_prefixes_are_shared_within_an_adapter_only(llama: Path, four: dict[str, Path]) -> None:
    with engine_with(llama, four) as engine:
        assert [cached(engine, name) for name in ("", "a", "b", "", "a", "b")] == [
            0,
            0,
            0,
            32,
            32,
            32,
        ]


def test_a_replaced_adapter_does_not_hit_the_old_version_s_cache(
    llama: Path, four: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(four["a"], folder)
    with engine_with(llama, {"mine": folder, "b": four["b"]}) as engine:
        first, second = ask(engine, "mine"), ask(engine, "b")
        assert first != second
        shutil.rmtree(folder)
        shutil.copytree(four["b"], folder)
        assert cached(engine, "mine") == 0
        assert ask(engine, "mine") == second
        shutil.rmtree(folder)
        with pytest.raises(RequestError, match="adapter 'mine' cannot be used: there is no folder"):
            ask(engine, "mine")
        assert ask(engine, "b") == second


def test_more_adapters_than_slots_give_the_same_answers(llama: Path, four: dict[str, Path]) -> None:
    with engine_with(llama, four) as engine:
        wanted = {name: ask(engine, name) for name in four}
    assert len(set(wanted.values())) == 4
    with engine_with(
        llama, four, max_loras=2, max_cached_loras=2, num_blocks=400, prefix_cache=False
    ) as engine:
        names = [name for _ in range(3) for name in four]
        ids = [engine.add_request(PROMPT, greedy(8, name)) for name in names]
        outputs = [engine.result(request_id) for request_id in ids]
        runner: Any = engine.runner
        assert len(runner._adapters._loaded) == 2
    assert [output.token_ids for output in outputs] == [wanted[name] for name in names]


@pytest.mark.parametrize("settings", [{}, FUSED])
def test_steps_without_adapters_leave_the_model_unchanged(
    llama: Path, four: dict[str, Path], settings: dict[str, object]
) -> None:
    with engine_with(llama, four, **settings) as engine:
        runner: Any = engine.runner
        model = runner._loaded.model
        before = {id(module): dict(module.__dict__) for module in model.modules()}
        answer = ask(engine)
        ask(engine, "a")
        assert any(module.__dict__ != before[id(module)] for module in model.modules()), (
            "nothing was ever adapted"
        )
        assert ask(engine) == answer
        for module in model.modules():
            ours = {name for name in module.__dict__ if not name.startswith("_")}
            assert ours == {name for name in before[id(module)] if not name.startswith("_")}
            assert all(
                module.__dict__[name] is before[id(module)][name]
                for name in ours & {"qkv", "out", "gate_up"}
            )


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_take_adapters_too(
    llama: Path, four: dict[str, Path], quantization: str
) -> None:
    """A strong adapter decides the first token whatever the base's rounding; none leaves the base's
    own.
    """
    with engine_with(llama, four, **(FUSED | {"quantization": quantization})) as engine:
        answers = {name: ask(engine, name) for name in ("", "a", "b")}
        assert len(set(answers.values())) == 3
        assert {name: ask(engine, name) for name in answers} == answers


def test_steps_with_adapters_run_without_graphs(llama: Path, four: dict[str, Path]) -> None:
    def capture(run: Any) -> CapturedGraph:
        output = run().clone()

        def replay() -> None:
            output.copy_(run())

        return CapturedGraph(replay, output)

    with engine_with(llama, four) as engine:
        wanted = [ask(engine, name) for name in ("", "a", "", "b")]
    with engine_with(llama, four) as engine:
        runner: Any = engine.runner
        graphs = GraphRunner(runner.forward, runner.info.config, runner.info.max_model_len, capture)
        runner.graphs = graphs
        answers, replays = [], []
        for name in ("", "a", "", "b"):
            before = graphs.num_replays
            answers.append(ask(engine, name))
            replays.append(graphs.num_replays - before)
    assert answers == wanted
    assert replays[0] > 0
    assert replays[1] == replays[3] == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_holds_at_most_max_loras_and_no_request_starves(is_async: bool) -> None:
    loop = Loop.build(max_loras=2, max_num_seqs=6, max_bypass=3, is_async=is_async)
    for i in range(40):
        adapter = ("", "a@1", "b@1", "c@1", "a@2")[i * 7 % 5]
        loop.add(make_sequence(f"s{i}", [1 + i, 2, 3, 4, 5], adapter=adapter))
    loop.run()
    held = [{item.sequence.adapter for item in plan.scheduled} - {""} for plan in loop.plans]
    assert max(map(len, held)) == 2
    assert len(loop.ends) == 40


def test_wrong_adapter_settings_are_refused() -> None:
    config = EngineConfig(model="m", adapters=" a = /x , b=/y,")
    assert config.adapter_folders == {"a": "/x", "b": "/y"}
    for wrong, words in (
        ("a", "must be name=folder"),
        ("a=/x,a=/y", "names 'a' twice"),
        ("=/x", "must be name=folder"),
    ):
        with pytest.raises(EngineConfigError, match=words):
            EngineConfig(model="m", adapters=wrong)


def test_a_wrong_number_of_rows_at_a_layer_is_an_error() -> None:
    plan = StepPlan(0, (ScheduledSequence(make_sequence("r", [1] * 8), 0, 5, samples=False),))
    batch = AdapterBatch.of(plan, {}, torch.device("cpu"), head="lm_head")
    with pytest.raises(RuntimeError, match="sees 3 rows of the step's 5"):
        batch.add("site", torch.zeros(3, 4), torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="sees 3 rows of the step's 0"):
        batch.add("lm_head", torch.zeros(3, 4), torch.zeros(3, 4))
