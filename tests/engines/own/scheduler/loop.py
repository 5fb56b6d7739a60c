"""Drives a scheduler and the fake device through the engine's own `StepExecutor`.

Steps run synchronously or one step ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tests.engines.own.scheduler.fake_device import (
    EOS,
    FakeDevice,
    expected_scores,
    expected_tokens,
)
from tests.engines.own.scheduler.integrity import check_integrity
from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.config.cache import CacheConfig, LayerGroup, Window
from tokenmill_worker.engines.own.execution.interface import NO_HOOKS
from tokenmill_worker.engines.own.plan import StepOutput, StepPlan
from tokenmill_worker.engines.own.scheduler import Scheduler
from tokenmill_worker.engines.own.scheduler.step_builder import Proposer
from tokenmill_worker.engines.own.sequence import Sequence
from tokenmill_worker.engines.own.stepping import StepExecutor

MAX_MODEL_LEN = 256


@dataclass(slots=True)
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def make_cache(
    num_blocks: int = 64,
    block_size: int = 4,
    windows: tuple[int | Window | None, ...] = (None,),
    num_host_blocks: int = 0,
    prefix_cache: bool = True,
    kernel_blocks: tuple[int, ...] = (1, 1, 1),
) -> CacheConfig:
    """Make a cache with a group for each window, and that many blocks for each group.

    A number is the size of a sliding window.
    """
    made = [Window(window) if isinstance(window, int) else window for window in windows]
    kinds = enumerate(zip(made, kernel_blocks, strict=False))
    groups = tuple(LayerGroup((index,), 1, 1, *kind) for index, kind in kinds)
    count = len(groups)
    return CacheConfig(
        block_size, groups, 1 + count * (num_blocks - 1), count * num_host_blocks, prefix_cache
    )


def make_sequence(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    resumed: tuple[int, ...] = (),
    choice: int = 0,
    **fields: object,
) -> Sequence:
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return Sequence(
        request_id=name,
        token_ids=[*prompt, *resumed],
        num_prompt_tokens=len(prompt),
        params=params,  # type: ignore[arg-type]
        choice=choice,
        num_resumed_tokens=len(resumed),
        max_tokens=max_tokens,
        **fields,  # type: ignore[arg-type]
    )


def make_given(name: str, prompt: list[int], answer: list[int], **fields: object) -> Sequence:
    """Make a sequence whose answer is given, to be scored."""
    begin, end = len(prompt), len(prompt) + len(answer)
    resumed = fields.get("num_resumed_tokens", 0)
    return Sequence(
        request_id=name,
        token_ids=[*prompt, *answer],
        num_prompt_tokens=begin,
        params=SamplingParams(),
        max_tokens=len(answer),
        next_scored=begin + resumed,  # type: ignore[operator]
        scored_end=end,
        **fields,  # type: ignore[arg-type]
    )


class FakeRunner:
    """The fake device as a runner: it launches in order, and voids a step on top of a failed one.

    On an asynchronous device every second failure is raised at launch, the others by `finish`.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        # a failed step has been launched and its result not been asked for
        self._has_failed = False
        self._num_failures = 0
        self.info, self.hooks = SimpleNamespace(is_asynchronous=loop.is_async), NO_HOOKS
        self.known: set[Sequence] = set()  # launched and not released: a runner keeps rows for them
        self._released: list[Sequence] = []

    def launch(self, plan: StepPlan) -> tuple[StepPlan, StepOutput | None]:
        self._loop.note(plan)
        self._loop.check()
        self.known.update(item.sequence for item in plan.scheduled)
        if self._has_failed:
            self._loop.device.spoil(plan)
            self._raise_now_and_then()
            return plan, None
        try:
            return plan, self._loop.device.execute(plan)
        except RuntimeError:
            self._raise_now_and_then()
            self._has_failed = True
            return plan, None
        # a failed check: `StepExecutor` must not take it for a failed step
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}")

    def _raise_now_and_then(self) -> None:
        self._num_failures += 1
        if self._num_failures % 2 or not self._loop.is_async:
            raise RuntimeError("the launch failed")

    def finish(self, step: tuple[StepPlan, StepOutput | None]) -> StepOutput:
        if step[1] is None:
            self._has_failed = False
            raise RuntimeError("the step failed")
        return step[1]

    def release(self, sequences: Iterable[Sequence]) -> None:
        self._released += sequences
        self.known.difference_update(self._released)

    def take_released(self) -> list[Sequence]:
        """Return the sequences released since the last call."""
        released, self._released = self._released, []
        return released

    def is_alive(self) -> bool:
        return True


@dataclass(slots=True)
class Loop:
    """One engine loop; `events` collects everything, `tokens` per (request, choice)."""

    scheduler: Scheduler
    device: FakeDevice
    clock: Clock
    is_async: bool = False
    checks: bool = True  # of the scheduler's integrity, before each launch and after each step
    events: list[TokenEvent] = field(default_factory=list)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    truth: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    scores: dict[tuple[str, int], list[TokenLogprob]] = field(default_factory=dict)
    true_scores: dict[tuple[str, int], list[TokenLogprob]] = field(default_factory=dict)
    given: set[tuple[str, int]] = field(default_factory=set)  # those whose answer was given
    plans: list[StepPlan] = field(default_factory=list)  # those that were launched
    seconds_of: Callable[[StepPlan], float] = lambda _plan: 0.0
    runner: FakeRunner = field(init=False)
    steps: StepExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self)
        self.steps = StepExecutor(self.runner, self.scheduler)  # type: ignore[arg-type]  # as much of a runner as steps call

    @classmethod
    def build(
        cls,
        cache: CacheConfig | None = None,
        *,
        is_async: bool = False,
        proposer: Proposer | None = None,
        ageing_s: float = 30.0,
        max_model_len: int = MAX_MODEL_LEN,
        **settings: object,
    ) -> Loop:
        cache = cache or make_cache()
        defaults: dict[str, object] = {"safety_margin": 0.0, "block_size": cache.block_size}
        config = EngineConfig(model="fake", **{**defaults, **settings})  # type: ignore[arg-type]
        config = config.with_step_sizes(on_gpu=False)
        clock = Clock()
        scheduler = Scheduler(
            config,
            cache,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            clock=clock,
            proposer=proposer,
            async_depth=int(is_async),
            ageing_s=ageing_s,
        )
        return cls(scheduler, FakeDevice(cache), clock, is_async)

    def add(self, *sequences: Sequence) -> None:
        self.scheduler.add(list(sequences))
        for sequence in sequences:
            name = (sequence.request_id, sequence.choice)
            self.truth[name] = expected_tokens(sequence)
            self.true_scores[name] = expected_scores(sequence)
            if sequence.num_output_tokens >= sequence.max_tokens:
                self.given.add(name)

    def cancel(self, request_id: str, choice: int | None = None) -> list[TokenEvent]:
        return self._take(self.scheduler.cancel(request_id, FinishReason.CANCELLED, choice))

    def step(self) -> list[TokenEvent]:
        events = self._take(self.scheduler.expire())
        events += self._take(self.steps.next())
        self.check()
        return events

    def check(self) -> None:
        if self.checks:
            check_integrity(self.scheduler)

    def run(self, max_steps: int = 2000) -> None:
        """Step until no work is left. Raises AssertionError after `max_steps` steps."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.steps.has_in_flight:
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.request_ids()}")

    def assert_truth(self) -> None:
        """Check that each request that ended by itself has the tokens of a lone run, and the
        log-probabilities that it asked for.

        All others must have the beginning of those tokens.
        """
        for name, scores in self.true_scores.items():
            had = self.scores.get(name, [])
            has_ended = self.ends.get(name) in (FinishReason.STOP, FinishReason.LENGTH)
            assert had == (scores if has_ended else scores[: len(had)]), name
        for name, truth in self.truth.items():
            said = self.tokens.get(name, [])
            if self.ends.get(name) in (FinishReason.STOP, FinishReason.LENGTH):
                assert said == truth, name
            else:
                assert said == truth[: len(said)], name

    def plan(self) -> StepPlan:
        """Return a plan that the caller executes and commits."""
        plan = self.scheduler.plan()
        self.note(plan)
        return plan

    def note(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.clock.now += self.seconds_of(plan)

    def _take(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            name = (event.request_id, event.choice)
            assert name not in self.ends, f"{name} goes on after its end"
            self.tokens.setdefault(name, []).extend(event.token_ids)
            is_given = name in self.given
            own = event.logprobs or () if is_given else event.prompt_logprobs
            self.scores.setdefault(name, []).extend(own)
            if event.finish_reason is not None:
                self.ends[name] = event.finish_reason
        self.events += events
        return events
