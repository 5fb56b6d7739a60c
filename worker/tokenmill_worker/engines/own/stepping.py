"""Runs steps one after the other: the scheduler plans, the runner executes, the scheduler commits.

A draft model, if there is one, drafts before a step is planned.

On an asynchronous device the next step is planned and launched before the last one's tokens reach
the host.

`failed_steps.py` finds the sequences that make a step fail.
"""

from __future__ import annotations

from typing import Any

from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines.own.execution.interface import Runner
from tokenmill_worker.engines.own.failed_steps import FailedSteps
from tokenmill_worker.engines.own.plan import StepOutput, StepPlan
from tokenmill_worker.engines.own.scheduler import Scheduler


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
