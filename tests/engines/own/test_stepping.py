"""Failing steps: one request fails, or the engine does; never one request after the other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.scheduler.loop import Clock, make_cache, make_sequence
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import Prompt
from tokenmill_worker.engines.own import Engine, EngineConfig, GenerationRequest
from tokenmill_worker.engines.own.errors import EngineError, StepsFailError
from tokenmill_worker.engines.own.execution.interface import NO_HOOKS
from tokenmill_worker.engines.own.plan import StepOutput, StepPlan
from tokenmill_worker.engines.own.scheduler import Scheduler
from tokenmill_worker.engines.own.stepping import MAX_FAILED_REQUESTS, StepExecutor
from tokenmill_worker.engines.synthetic.runner import SyntheticRunner

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


def holds(plan: StepPlan, *names: str) -> bool:
    return any(item.sequence.request_id.startswith(names) for item in plan.scheduled)


class Faulty(SyntheticRunner):
    """`fails(plan)`: the step raises. `spoils(plan)`: none of its logits are finite."""

    fails: Callable[[StepPlan], bool]
    spoils: Callable[[StepPlan], bool]
    num_failed: int

    @classmethod
    def make(
        cls, fails: Callable[[StepPlan], bool] = lambda _plan: False,
        spoils: Callable[[StepPlan], bool] = lambda _plan: False,
    ) -> Faulty:  # fmt: skip
        runner = cls.load(EngineConfig(model="synthetic", num_blocks=4096, max_num_seqs=64))
        assert isinstance(runner, cls)
        runner.fails, runner.spoils, runner.num_failed = fails, spoils, 0
        return runner

    def finish(self, plan: StepPlan) -> StepOutput:
        if self.fails(plan):
            self.num_failed += 1
            raise RuntimeError("No space left on device (kernel cache)")
        output = super().finish(plan)
        if not self.spoils(plan):
            return output
        sampling = [index for index, item in enumerate(plan.scheduled) if item.samples]
        nothing: tuple[tuple[int, ...], ...] = ((),) * len(sampling)
        return StepOutput(
            plan.step_id, nothing, (None,) * len(sampling), dict.fromkeys(sampling, NOT_FINITE)
        )


def requests(*names: str) -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return [
        GenerationRequest(request_id=name, prompt=Prompt((1, 2, 3)), params=params)
        for name in names
    ]


def run(engine: Engine) -> dict[str, TokenEvent]:
    """Return the last event of each request."""
    ends: dict[str, TokenEvent] = {}
    while engine.has_work:
        ends |= {
            event.request_id: event for event in engine.step() if event.finish_reason is not None
        }
    return ends


def test_a_step_that_fails_with_any_content_is_an_engine_error() -> None:
    runner = Faulty.make(fails=lambda plan: True)
    engine = Engine.around(runner)
    engine.submit(requests(*(f"job-{number}" for number in range(200))))
    events: list[TokenEvent] = []
    with pytest.raises(StepsFailError, match="No space left on device"):
        events += engine.step()
    assert events == []
    assert runner.num_failed == 2  # the step, and the probe: nothing is bisected
    assert len(engine.request_ids()) == 200


def test_a_lone_request_does_not_fail_if_every_step_of_the_engine_fails() -> None:
    engine = Engine.around(Faulty.make(fails=lambda plan: True))
    engine.submit(requests("alone"))
    with pytest.raises(EngineError):
        engine.step()


def test_a_model_without_finite_logits_for_any_token_is_an_engine_error() -> None:
    engine = Engine.around(Faulty.make(spoils=lambda plan: True))
    engine.submit(requests("a", "b", "c"))
    with pytest.raises(StepsFailError, match="not finite"):
        engine.step()


def test_a_request_without_finite_logits_fails_alone() -> None:
    engine = Engine.around(
        Faulty.make(spoils=lambda plan: holds(plan, "bad") and len(plan.scheduled) == 1)
    )
    engine.submit(requests("bad"))
    ends = run(engine)
    assert (ends["bad"].finish_reason, ends["bad"].error) == (FinishReason.ERROR, NOT_FINITE)


def test_many_bad_requests_fail_and_the_good_ones_among_them_end() -> None:
    engine = Engine.around(Faulty.make(fails=lambda plan: holds(plan, "bad")))
    engine.submit(
        requests(
            *(f"bad-{number}" for number in range(40)), *(f"good-{number}" for number in range(20))
        )
    )
    ends = run(engine)
    assert len(ends) == 60
    assert {name for name, event in ends.items() if event.finish_reason is FinishReason.ERROR} == {
        f"bad-{number}" for number in range(40)
    }


def test_bad_requests_without_good_ones_fail_one_by_one() -> None:
    engine = Engine.around(Faulty.make(fails=lambda plan: holds(plan, "bad")))
    engine.submit(requests("bad-1", "bad-2"))
    assert {event.finish_reason for event in run(engine).values()} == {FinishReason.ERROR}


@pytest.mark.parametrize("together", [True, False])
def test_many_failing_requests_in_a_row_are_an_engine_error(together: bool) -> None:
    """The probe passes, as it may where memory is short: it holds fewer rows and no penalties."""
    engine = Engine.around(Faulty.make(fails=lambda plan: not holds(plan, "probe")))
    names = [f"job-{number}" for number in range(50)]
    ends: dict[str, TokenEvent] = {}

    def feed() -> None:
        for part in [names] if together else [[name] for name in names]:
            engine.submit(requests(*part))
            ends.update(run(engine))

    with pytest.raises(StepsFailError, match="no step succeeded between"):
        feed()
    assert len(ends) <= MAX_FAILED_REQUESTS


def test_a_successful_step_resets_the_count_of_failing_requests() -> None:
    engine = Engine.around(Faulty.make(fails=lambda plan: holds(plan, "bad")))
    for number in range(3 * MAX_FAILED_REQUESTS):
        engine.submit(requests(f"bad-{number}"))
        assert run(engine)[f"bad-{number}"].finish_reason is FinishReason.ERROR
        engine.submit(requests(f"good-{number}"))
        assert run(engine)[f"good-{number}"].finish_reason is FinishReason.LENGTH


class Ahead:
    """An asynchronous runner: the launches and finishes with these numbers fail, each once."""

    info, hooks = SimpleNamespace(is_asynchronous=True), NO_HOOKS

    def __init__(self, launches: set[int], finishes: set[int]) -> None:
        self._launches, self._finishes = launches, finishes
        self._count = 0

    def launch(self, plan: StepPlan) -> tuple[StepPlan, int]:
        self._count += 1
        if self._count in self._launches:
            raise RuntimeError(f"launch {self._count}")
        return plan, self._count

    def finish(self, step: tuple[StepPlan, int]) -> StepOutput:
        plan, number = step
        if number in self._finishes:
            raise RuntimeError(f"finish {number}")
        sampling = sum(item.samples for item in plan.scheduled)
        return StepOutput(plan.step_id, ((7,),) * sampling, (None,) * sampling, {})

    def release(self, sequences: object) -> None:
        """Do nothing: this runner keeps no state of a step."""

    def is_alive(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("launches", "finishes"), [({2}, {1}), (set(), {1}), ({1}, set()), ({2}, set())]
)
def test_a_step_on_top_of_a_failed_one_is_void_and_fails_no_request(
    launches: set[int], finishes: set[int]
) -> None:
    """Both faults are transient, those of the failed step and of the one on top.

    Each sequence runs again.
    """
    scheduler = Scheduler(
        EngineConfig(model="fake", block_size=4).with_step_sizes(on_gpu=False),
        make_cache(),
        max_model_len=256,
        eos_token_ids=frozenset({0}),
        clock=Clock(),
        async_depth=1,
    )
    steps = StepExecutor(Ahead(launches, finishes), scheduler)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for name in "ab":
        scheduler.add([make_sequence(name, [1, 2, 3], 9, params=params)])
    events = steps.next()
    scheduler.cancel("b", FinishReason.CANCELLED)  # one sequence is left, and stands alone at once
    while scheduler.has_work or steps.has_in_flight:
        events += steps.next()
        check_integrity(scheduler)
    assert [
        (event.request_id, event.finish_reason, event.error)
        for event in events
        if event.finish_reason
    ] == [("a", FinishReason.LENGTH, None)]
    assert sum(len(event.token_ids) for event in events if event.request_id == "a") == 9
