"""One step after the other: the scheduler plans, the runner executes, the scheduler commits.

On an asynchronous device the next step is planned and launched before the last one's tokens reach the host. A step
that raises is bisected: the sequence that breaks it fails alone and the others go on. It knows no requests.
"""

from __future__ import annotations

from typing import Any

from worker.engine.faults import EngineError, is_device_lost, sentence_of
from worker.engine.plan import StepOutput, StepPlan
from worker.engine.runners import Runner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.types import TokenEvent


class Steps:
    """Those of one engine."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._in_flight: tuple[StepPlan, Any] | None = None
        self.num_begun = self.num_failed = 0

    @property
    def are_under_way(self) -> bool:
        return self._in_flight is not None

    def next(self) -> list[TokenEvent]:
        """Raises EngineError when the device is lost."""
        return self._launch_and_finish() if self._runner.is_asynchronous else self._execute()

    def _execute(self) -> list[TokenEvent]:
        plan = self._scheduler.plan()
        if plan.is_empty:
            return []
        self.num_begun += 1
        try:
            output = self._runner.execute(plan)
        except Exception as error:
            return self._bisect(plan, error)
        return self._commit(plan, output)

    def _launch_and_finish(self) -> list[TokenEvent]:
        """Launch step N+1 from a plan with placeholders, then wait for step N and commit it."""
        previous = self._in_flight
        plan = self._scheduler.plan()
        # Before the launch: who lost his place in this plan may have been given one again, and begins anew with it.
        self._runner.release(self._scheduler.take_released())
        self._in_flight = None
        try:
            if not plan.is_empty:
                self.num_begun += 1
                self._in_flight = (plan, self._runner.launch(plan))
        except Exception as error:
            events = self._finish(previous) if previous else []
            return events + self._bisect(plan, error)
        return self._finish(previous) if previous else []

    def _finish(self, launched: tuple[StepPlan, Any]) -> list[TokenEvent]:
        plan, step = launched
        try:
            output = self._runner.finish(step)
        except Exception as error:
            if self._in_flight is not None:  # what was launched on top of a failed step is void too
                self._scheduler.abandon(self._in_flight[0])
                self._in_flight = None
            return self._bisect(plan, error)
        return self._commit(plan, output)

    def _commit(self, plan: StepPlan, output: StepOutput) -> list[TokenEvent]:
        events = self._scheduler.commit(plan, output)
        self._runner.release(self._scheduler.take_released())
        return events

    def _bisect(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        """A step raised: take it back, then run halves of it until the guilty sequence stands alone."""
        self.num_failed += 1
        self._scheduler.abandon(plan)
        if is_device_lost(error) or not self._runner.is_alive():
            raise EngineError(f"the device is lost: {error}") from error
        sequences = [item.sequence for item in plan.scheduled]
        if len(sequences) == 1:
            return self._scheduler.fail(sequences[0], f"the model failed on this request: {sentence_of(error)}")
        if not sequences:
            raise EngineError(f"a step without sequences failed: {error}") from error
        middle = len(sequences) // 2
        return self._run_only(sequences[:middle]) + self._run_only(sequences[middle:])

    def _run_only(self, sequences: list[Sequence]) -> list[TokenEvent]:
        plan = self._scheduler.plan(only=sequences)
        if plan.is_empty:
            return []
        try:
            output = self._runner.execute(plan)
        except Exception as error:
            return self._bisect(plan, error)
        return self._commit(plan, output)
