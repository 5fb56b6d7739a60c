"""An engine runs a prompt and its decode before it reports ready, and leaves nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.own.lora.support import engine_with, greedy
from tests.support.collecting_engine import CollectingEngine
from tokenmill_worker.contract.messages import (
    EngineFailed,
    LoadProgress,
    Mailbox,
    Ready,
    Report,
    Stop,
    Submit,
)
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.own.execution.runner import InFlightStep
from tokenmill_worker.engines.own.plan import StepPlan
from tokenmill_worker.engines.own.serve.loop import EngineLoop

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    return folder_of(request.param)


def reports_of(engine: CollectingEngine) -> list[Report]:
    reports: list[Report] = []
    mailbox = Mailbox()
    mailbox.put(Stop())
    EngineLoop(engine, mailbox, reports.append).run()
    return reports


@pytest.mark.parametrize("num_blocks", [6, 300])
def test_an_engine_runs_steps_before_it_is_ready_and_keeps_no_blocks(
    folder: Path, num_blocks: int
) -> None:
    engine = engine_with(folder, {}, num_blocks=num_blocks)
    runner: Any = engine.runner
    steps: list[str] = []
    launch = runner.launch

    def noted(plan: StepPlan) -> InFlightStep:
        steps.append(
            "decode" if all(item.num_tokens == 1 for item in plan.scheduled) else "prefill"
        )
        step: InFlightStep = launch(plan)
        return step

    runner.launch = noted
    reports = reports_of(engine)
    assert steps == ["prefill", "decode"] * 2
    assert [type(report) for report in reports] == [LoadProgress, Ready]
    assert not runner._inputs._rows
    stats = engine.stats()
    assert (stats.steps, stats.blocks_cached, stats.blocks_free) == (0, 0, stats.blocks_total)


@pytest.mark.parametrize("breaks", ["warm_up", "step"])
def test_a_lost_device_whose_close_fails_is_reported_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    engine = engine_with(folder, {})
    runner: Any = engine.runner

    def fails(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(runner, "close", fails)
    monkeypatch.setattr(runner, "is_alive", lambda: False)
    reports: list[Report] = []

    def on_report(report: Report) -> None:
        reports.append(report)
        if isinstance(report, Ready):
            runner.launch = fails

    if breaks == "warm_up":
        runner.launch = fails
    mailbox = Mailbox()
    mailbox.put(Submit((GenerationRequest(request_id="a", prompt=Prompt(tuple(PROMPT))),)))
    EngineLoop(engine, mailbox, on_report).run()
    assert [type(report) for report in reports[1:]] == (
        [EngineFailed] if breaks == "warm_up" else [Ready, EngineFailed]
    )
    assert "device lost" in reports[-1].message  # type: ignore[union-attr]


def test_a_warm_up_changes_no_answer(folder: Path) -> None:
    cold, warm = engine_with(folder, {}), engine_with(folder, {})
    reports_of(warm)
    assert (
        warm.generate_batch([PROMPT], greedy(12))[0].token_ids
        == cold.generate_batch([PROMPT], greedy(12))[0].token_ids
    )


def test_a_first_step_that_fails_ends_the_start(folder: Path) -> None:
    engine = engine_with(folder, {})
    runner: Any = engine.runner

    def fails(_plan: object) -> None:
        raise RuntimeError("no kernel image is available")

    runner.launch = fails
    *_, last = reports_of(engine)
    assert last == EngineFailed(
        "the first step failed: RuntimeError: no kernel image is available", at_start=True
    )
