"""Runs the real scheduler in virtual time: step times from the cost model, tokens made up."""

from dataclasses import dataclass, field

from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.trace import Arrival
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engine.cache_config import CacheConfig, LayerGroup
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.plan import StepOutput
from tokenmill_worker.engine.scheduler import Scheduler
from tokenmill_worker.engine.sequence import Sequence

BLOCK_SIZE = 16
_ANY_TOKEN = (5,)


@dataclass(slots=True)
class Outcome:
    """Times of one request as its subscriber saw them, in seconds of virtual time."""

    arrival: Arrival
    first_at: float | None = None
    last_at: float | None = None
    num_tokens: int = 0
    longest_gap_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.arrival.at

    @property
    def tpot_s(self) -> float | None:
        if self.first_at is None or self.last_at is None or self.num_tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.num_tokens - 1)

    def take(self, count: int, now: float) -> None:
        if self.last_at is not None:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
        self.first_at = self.first_at if self.first_at is not None else now
        self.last_at = now
        self.num_tokens += count

    @property
    def is_complete(self) -> bool:
        return self.num_tokens == self.arrival.num_output_tokens


@dataclass(slots=True)
class SimulatedEngine:
    """Engine with the real scheduler; `settings` are EngineConfig's.

    The pool is as large as the device's memory allows.
    """

    costs: CostModel
    settings: dict[str, object]
    now: float = 0.0
    steps: int = 0
    busy_s: float = 0.0
    _scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        num_blocks = self.costs.num_cache_tokens // BLOCK_SIZE
        config = EngineConfig(
            model="simulated",
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            prefix_cache=False,
            max_waiting=10_000_000,
            **self.settings,  # type: ignore[arg-type]
        )
        group = LayerGroup((0,), 1, 1)
        cache = CacheConfig(BLOCK_SIZE, (group,), (num_blocks,), (0,), prefix_cache=False)
        self._scheduler = Scheduler(
            config, cache, max_model_len=8_192, eos_token_ids=frozenset(), clock=lambda: self.now
        )

    def run(self, arrivals: list[Arrival], until: float) -> list[Outcome]:
        """Serve the requests in order of arrival; those not finished at `until` stay unfinished."""
        outcomes = [Outcome(arrival) for arrival in arrivals]
        position = 0
        while self.now < until:
            while position < len(arrivals) and arrivals[position].at <= self.now:
                self._scheduler.add([_sequence(position, arrivals[position])])
                position += 1
            if not self._step(outcomes):
                if position == len(arrivals):
                    break
                self.now = arrivals[position].at
        return outcomes

    def _step(self, outcomes: list[Outcome]) -> bool:
        plan = self._scheduler.plan()
        if plan.is_empty:
            return False
        seconds = self.costs.step_s(plan)
        self.now += seconds
        self.busy_s += seconds
        self.steps += 1
        num_sampled = sum(item.samples for item in plan.scheduled)
        output = StepOutput(plan.step_id, (_ANY_TOKEN,) * num_sampled, (None,) * num_sampled, {})
        for event in self._scheduler.commit(plan, output):
            if event.token_ids:
                outcomes[int(event.request_id)].take(len(event.token_ids), self.now)
        self._scheduler.take_released()
        return True


def _sequence(index: int, arrival: Arrival) -> Sequence:
    return Sequence(
        request_id=str(index),
        token_ids=[7] * arrival.num_prompt_tokens,
        num_prompt_tokens=arrival.num_prompt_tokens,
        params=SamplingParams(temperature=0, max_tokens=arrival.num_output_tokens, ignore_eos=True),
        priority=arrival.rank,
        tenant=arrival.tenant,
    )
