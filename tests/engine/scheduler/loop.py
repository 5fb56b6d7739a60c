"""Drives a scheduler with the fake device, synchronously or one step ahead, as the engine does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.generation import FinishReason, SamplingParams
from tests.engine.scheduler.fake_device import EOS, FakeDevice, expected_tokens
from worker.engine.config import CacheConfig, EngineConfig, LayerGroup
from worker.engine.plan import StepOutput, StepPlan
from worker.engine.scheduler import Scheduler
from worker.engine.scheduler.planner import Proposer
from worker.engine.sequence import Sequence
from worker.engine.types import TokenEvent

MAX_MODEL_LEN = 256


@dataclass(slots=True)
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def make_cache(
    num_blocks: int = 64, block_size: int = 4, windows: tuple[int | None, ...] = (None,), num_host_blocks: int = 0,
    prefix_cache: bool = True,
) -> CacheConfig:  # fmt: skip
    groups = tuple(LayerGroup((index,), 1, 1, window) for index, window in enumerate(windows))
    count = len(groups)
    return CacheConfig(block_size, groups, (num_blocks,) * count, (num_host_blocks,) * count, prefix_cache)


def make_sequence(
    name: str, prompt: list[int], max_tokens: int = 8, resumed: tuple[int, ...] = (), choice: int = 0, **fields: object
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


@dataclass(slots=True)
class Loop:
    """One engine loop; `events` collects everything, `tokens` per (request, choice)."""

    scheduler: Scheduler
    device: FakeDevice
    clock: Clock
    is_async: bool = False
    checks: bool = True
    events: list[TokenEvent] = field(default_factory=list)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    truth: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    seconds_of: Callable[[StepPlan], float] = lambda _plan: 0.0
    _in_flight: tuple[StepPlan, StepOutput | None] | None = None

    @classmethod
    def build(
        cls, cache: CacheConfig | None = None, *, is_async: bool = False, proposer: Proposer | None = None,
        ageing_s: float = 30.0, **settings: object,
    ) -> Loop:  # fmt: skip
        cache = cache or make_cache()
        defaults: dict[str, object] = {"safety_margin": 0.0, "block_size": cache.block_size}
        config = EngineConfig(model="fake", **{**defaults, **settings})  # type: ignore[arg-type]
        clock = Clock()
        scheduler = Scheduler(
            config,
            cache,
            max_model_len=MAX_MODEL_LEN,
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
            self.truth[sequence.request_id, sequence.choice] = expected_tokens(sequence)

    def cancel(self, request_id: str, choice: int | None = None) -> list[TokenEvent]:
        return self._take(self.scheduler.cancel(request_id, FinishReason.CANCELLED, choice))

    def step(self) -> list[TokenEvent]:
        events = self._take(self.scheduler.expire())
        events += self._step_async() if self.is_async else self._step_sync()
        if self.checks:
            self.scheduler.check_integrity()
        return events

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is left; fails if that takes too long."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and self._in_flight is None:
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.request_ids()}")

    def assert_truth(self) -> None:
        """Every request that ended by itself said what it says alone; the others said a beginning of it."""
        for name, truth in self.truth.items():
            said = self.tokens.get(name, [])
            if self.ends.get(name) in (FinishReason.STOP, FinishReason.LENGTH):
                assert said == truth, name
            else:
                assert said == truth[: len(said)], name

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.plans.append(plan)
        self.clock.now += self.seconds_of(plan)
        return plan

    def _step_sync(self) -> list[TokenEvent]:
        plan = self.plan()
        return [] if plan.is_empty else self._execute(plan)

    def _step_async(self) -> list[TokenEvent]:
        previous, plan = self._in_flight, self.plan()
        self._in_flight = None
        if previous is not None and previous[1] is None and not plan.is_empty:
            self.device.spoil(plan)  # launched on top of a step that has failed, though nobody knows yet
            self._in_flight = (plan, None)
        elif not plan.is_empty:
            try:
                self._in_flight = (plan, self.device.execute(plan))
            except RuntimeError:
                if len(self.plans) % 2:  # raised at once, or found when the result is asked for
                    self._in_flight = (plan, None)
                else:
                    events = self._finish(previous) if previous else []
                    return events + self._bisect(plan)
        return self._finish(previous) if previous else []

    def _finish(self, launched: tuple[StepPlan, StepOutput | None]) -> list[TokenEvent]:
        plan, output = launched
        if output is not None:
            return self._take(self.scheduler.commit(plan, output))
        if self._in_flight is not None:
            self.scheduler.abandon(self._in_flight[0])
            self._in_flight = None
        return self._bisect(plan)

    def _execute(self, plan: StepPlan) -> list[TokenEvent]:
        try:
            output = self.device.execute(plan)
        except RuntimeError:
            return self._bisect(plan)
        return self._take(self.scheduler.commit(plan, output))

    def _bisect(self, plan: StepPlan) -> list[TokenEvent]:
        self.scheduler.abandon(plan)
        if self.checks:
            self.scheduler.check_integrity()
        sequences = [item.sequence for item in plan.scheduled]
        if len(sequences) <= 1:
            return self._take([e for s in sequences for e in self.scheduler.fail(s, "it breaks the step")])
        events = []
        middle = len(sequences) // 2
        for half in (sequences[:middle], sequences[middle:]):
            plan = self.scheduler.plan(only=half)
            if not plan.is_empty:
                events += self._execute(plan)
        return events

    def _take(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            name = (event.request_id, event.choice)
            assert name not in self.ends, f"{name} goes on after its end"
            self.tokens.setdefault(name, []).extend(event.token_ids)
            if event.finish_reason is not None:
                self.ends[name] = event.finish_reason
        self.events += events
        return events
