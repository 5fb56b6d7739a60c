"""Runs the real scheduler in virtual time: step times from the cost model, tokens made up."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.simulation import costs
from ops.benchmarks.simulation.load import Arrival
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.config.cache import CacheConfig, LayerGroup
from tokenmill_worker.engine.plan import StepOutput
from tokenmill_worker.engine.scheduler import Scheduler
from tokenmill_worker.engine.sequence import Sequence as EngineSequence

BLOCK_SIZE, ANY_TOKEN = 16, 5
TTFT_LIMIT_S = {0: 1.0, 1: 5.0, 2: math.inf}  # by class: interactive, standard, bulk
GAP_LIMIT_S = {0: 0.2, 1: 0.5, 2: math.inf}  # longest silence within an answer


@dataclass(slots=True)
class RequestTimes:
    """Times of one request as its subscriber saw them, in seconds of virtual time."""

    arrival: Arrival
    first_at: float = math.inf
    last_at: float = 0.0
    num_tokens: int = 0
    longest_gap_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrival.at

    @property
    def is_good(self) -> bool:
        rank = self.arrival.rank
        is_quick = self.ttft_s <= TTFT_LIMIT_S[rank]
        return is_quick and self.longest_gap_s <= GAP_LIMIT_S[rank]

    def take(self, count: int, now: float) -> None:
        if self.num_tokens:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
        self.first_at = min(self.first_at, now)
        self.last_at = now
        self.num_tokens += count


class SimulatedEngine:
    """Engine with the real scheduler.

    Args:
        settings: EngineConfig's.
        cache_tokens: size of the KV cache; None: as large as the device's memory allows.
    """

    def __init__(self, settings: dict[str, object], cache_tokens: int | None = None) -> None:
        self.now, self.steps = 0.0, 0
        num_blocks = (cache_tokens or costs.num_cache_tokens()) // BLOCK_SIZE
        config = EngineConfig(
            model="simulated",
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            prefix_cache=False,
            max_waiting=10_000_000,
            **settings,  # type: ignore[arg-type]
        )
        cache = CacheConfig(BLOCK_SIZE, (LayerGroup((0,), 1, 1),), num_blocks, prefix_cache=False)
        self.scheduler = Scheduler(
            config, cache, max_model_len=8_192, eos_token_ids=frozenset(), clock=lambda: self.now
        )

    def run(self, trace: Sequence[Arrival]) -> list[RequestTimes]:
        """Serve the requests in order of arrival, until all have their answers."""
        outcomes = [RequestTimes(arrival) for arrival in trace]
        position = 0
        while True:
            while position < len(trace) and trace[position].at <= self.now:
                self.scheduler.add([_sequence(position, trace[position])])
                position += 1
            if (events := self._step()) is None:
                if position == len(trace):
                    return outcomes
                self.now = trace[position].at
            for event in events or ():
                outcomes[int(event.request_id)].take(len(event.token_ids), self.now)

    def _step(self) -> list[TokenEvent] | None:
        """Run a step and return its events that have tokens; None if nothing can run."""
        plan = self.scheduler.plan()
        if plan.is_empty:
            return None
        self.now += costs.step_s(plan)
        self.steps += 1
        count = sum(item.samples for item in plan.scheduled)
        output = StepOutput(plan.step_id, ((ANY_TOKEN,),) * count, (None,) * count, {})
        events = [event for event in self.scheduler.commit(plan, output) if event.token_ids]
        self.scheduler.take_released()
        return events


def _sequence(index: int, arrival: Arrival) -> EngineSequence:
    return EngineSequence(
        request_id=str(index),
        token_ids=[ANY_TOKEN] * arrival.num_prompt_tokens,
        num_prompt_tokens=arrival.num_prompt_tokens,
        params=SamplingParams(temperature=0, max_tokens=arrival.num_output_tokens, ignore_eos=True),
        priority=arrival.rank,
        tenant=arrival.tenant,
    )


def figures(outcomes: Sequence[RequestTimes], seconds: float = 0.0) -> dict[str, float]:
    """Compute the figures of a trace with arrivals during `seconds`; 0: until its last token.

    Times to the first token and gaps are those of the trace's most urgent class.
    """
    first = min(outcome.arrival.rank for outcome in outcomes)
    urgent = [outcome for outcome in outcomes if outcome.arrival.rank == first]
    ttft = [outcome.ttft_s for outcome in urgent]
    gaps = [outcome.longest_gap_s for outcome in urgent if outcome.num_tokens > 1]
    end = max(outcome.last_at for outcome in outcomes)
    return {
        "goodput": sum(outcome.is_good for outcome in outcomes) / (seconds or end),
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p99_s": percentile(ttft, 0.99),
        "gap_p99_ms": 1e3 * percentile(gaps, 0.99),
        "tokens_s": sum(outcome.num_tokens for outcome in outcomes) / end,
    }
