"""Runs steps one after the other: the scheduler plans, the runner executes, the scheduler commits.

A draft model, if there is one, drafts before a step is planned.

On an asynchronous device the next step is planned and launched before the last one's tokens reach
the host.

A step that raises is followed by a test step with dummy tokens (`Scheduler.probe`). If that fails
too, the engine is broken: EngineError. If it succeeds, the failed step is bisected: sequences that
fail alone end with an error, the others continue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines.own.errors import (
    EngineError,
    StepsFailError,
    is_device_lost,
    sentence_of,
)
from tokenmill_worker.engines.own.execution.interface import Runner
from tokenmill_worker.engines.own.plan import StepOutput, StepPlan
from tokenmill_worker.engines.own.scheduler import Scheduler
from tokenmill_worker.engines.own.sequence import Sequence

MAX_FAILED_REQUESTS = 8  # with more in a row, and no successful step between, the engine is broken
Commit = Callable[[StepPlan, StepOutput], list[TokenEvent]]


class StepExecutor:
    """Plans, executes and commits the steps of one engine."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._draft = runner.hooks.draft
        self._in_flight: tuple[StepPlan, Any] | None = None
        self._failures = FailedSteps(runner, scheduler, self._commit)
        self.num_begun = 0

    @property
    def has_in_flight(self) -> bool:
        return self._in_flight is not None

    @property
    def num_failed(self) -> int:
        return self._failures.num_failed

    def next(self) -> list[TokenEvent]:
        """Run the next step and return its events. Raises EngineError when the engine is broken."""
        return self._launch_and_finish() if self._runner.info.is_asynchronous else self._execute()

    def settle(self) -> list[TokenEvent]:
        """Wait for the step in flight, if there is one, and commit it; launch none."""
        previous, self._in_flight = self._in_flight, None
        if previous is None:
            return []
        return self._finish(*previous, StepPlan(-1, ()))

    def copy_blocks(self) -> None:
        """Run the copies of blocks that are planned, without any sequence. Raises EngineError."""
        self.settle()
        plan = self._scheduler.plan(only=())
        if not plan.is_empty:
            self._commit(plan, self._runner.finish(self._runner.launch(plan)))

    def _execute(self) -> list[TokenEvent]:
        if self._draft is not None:
            self._draft(self._scheduler.lookahead)
        plan = self._scheduler.plan()
        if plan.is_empty:
            return []
        self.num_begun += 1
        try:
            output = self._runner.finish(self._runner.launch(plan))
        except Exception as error:
            return self._failures.bisect(plan, error)
        return self._commit(plan, output)

    def _launch_and_finish(self) -> list[TokenEvent]:
        """Launch step N+1 with placeholders for N's tokens, then wait for step N and commit it."""
        previous, self._in_flight = self._in_flight, None
        plan = self._scheduler.plan()
        # Release before the launch: a sequence that this plan preempted may be admitted again in
        # it, with a new row.
        self._runner.release(self._scheduler.take_released())
        failure: Exception | None = None
        try:
            if not plan.is_empty:
                self.num_begun += 1
                self._in_flight = (plan, self._runner.launch(plan))
        except Exception as error:
            failure = error
        events = self._finish(*previous, plan) if previous is not None else []
        if failure is None or not self._scheduler.is_in_flight(plan):
            return events
        return events + self._failures.bisect(plan, failure)

    def _finish(self, plan: StepPlan, step: Any, following: StepPlan) -> list[TokenEvent]:
        """Wait for a step and commit it.

        If it failed, the following step builds on it and is abandoned too, whether launched or not.
        """
        try:
            output = self._runner.finish(step)
        except Exception as error:
            self._scheduler.abandon(following)
            self._in_flight = None
            return self._failures.bisect(plan, error)
        return self._commit(plan, output)

    def _commit(self, plan: StepPlan, output: StepOutput) -> list[TokenEvent]:
        if output.errors:
            self._failures.check_errors(plan, output)
        else:
            self._failures.note_success()
        events = self._scheduler.commit(plan, output)
        self._runner.release(self._scheduler.take_released())
        return events


class FailedSteps:
    """Bisects the failed steps of one engine. `commit` is called with each part that succeeds."""

    def __init__(self, runner: Runner, scheduler: Scheduler, commit: Commit) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._commit = commit
        # ids of requests that ended with an error since a step last succeeded
        self._failed: set[str] = set()
        self.num_failed = 0

    def note_success(self) -> None:
        if self._failed:
            self._failed.clear()

    def check_errors(self, plan: StepPlan, output: StepOutput) -> None:
        """Run a test step if no sequence has a usable result: the engine may be the cause.

        Raises EngineError if the test step fails too.
        """
        if len(output.errors) == sum(
            item.samples or item.num_scored > 0 for item in plan.scheduled
        ):
            self._probe(plan, next(iter(output.errors.values())))

    def _probe(self, plan: StepPlan, why: str) -> None:
        """Run a step of this size with dummy tokens. Raises EngineError if it fails too."""
        test = self._scheduler.probe(plan.num_tokens)
        try:
            problems = list(self._runner.finish(self._runner.launch(test)).errors.values())
        except Exception as error:
            problems = [sentence_of(error)]
        self._runner.release([item.sequence for item in test.scheduled])
        if problems:
            raise StepsFailError(f"steps fail whatever they hold: {problems[0]} (first: {why})")

    def bisect(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        """Undo a failed step, and run halves of it until the sequences that fail are alone.

        Parts are run breadth first, so that a success shows early that the engine works. A lone
        sequence runs once more.
        """
        sequences, why = self._take_back(plan, error)
        self._probe(plan, why)
        parts = deque(_halves(sequences))
        alone: list[tuple[Sequence, str]] = []
        events: list[TokenEvent] = []
        has_succeeded = False
        while parts:
            part = self._scheduler.plan(only=parts.popleft())
            if part.is_empty:
                continue
            try:
                output = self._runner.finish(self._runner.launch(part))
            except Exception as problem:
                sequences, why = self._take_back(part, problem)
                if len(sequences) == 1:
                    alone.append((sequences[0], why))
                else:
                    parts += _halves(sequences)
            else:
                events += self._commit(part, output)
                has_succeeded = True
        return events + self._fail(alone, has_succeeded)

    def _take_back(self, plan: StepPlan, error: Exception) -> tuple[list[Sequence], str]:
        """Abandon a step that raised; return its sequences and the reason.

        Raises EngineError if no sequence can be the cause.
        """
        self.num_failed += 1
        self._scheduler.abandon(plan)
        if is_device_lost(error) or not self._runner.is_alive():
            raise EngineError(f"the device is lost: {error}") from error
        if not plan.scheduled:
            raise EngineError(f"a step without sequences failed: {error}") from error
        return [item.sequence for item in plan.scheduled], sentence_of(error)

    def _fail(self, alone: list[tuple[Sequence, str]], has_succeeded: bool) -> list[TokenEvent]:
        """End the sequences that failed alone.

        Raises EngineError if too many requests failed and no step succeeded between.
        """
        if has_succeeded:
            self._failed.clear()
        else:
            self._failed.update(sequence.request_id for sequence, _ in alone)
        if len(self._failed) > MAX_FAILED_REQUESTS:
            why = alone[-1][1]
            raise StepsFailError(
                f"{len(self._failed)} requests failed and no step succeeded between: {why}"
            )
        events: list[TokenEvent] = []
        for sequence, why in alone:
            events += self._scheduler.fail(sequence, f"the model failed on this request: {why}")
        self._runner.release(self._scheduler.take_released())
        return events


def _halves(sequences: list[Sequence]) -> list[list[Sequence]]:
    middle = (len(sequences) + 1) // 2
    return [half for half in (sequences[:middle], sequences[middle:]) if half]
