"""Runs the real scheduler in virtual time: step times from the cost model, tokens made up.

`measure` compares scheduling policies on one engine under bursty load.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.load import Arrival, arrivals
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engine.cache_config import CacheConfig, LayerGroup
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.plan import StepOutput
from tokenmill_worker.engine.scheduler import Scheduler
from tokenmill_worker.engine.sequence import Sequence as EngineSequence
from tokenmill_worker.engine.types import TokenEvent

BLOCK_SIZE = 16
TTFT_LIMIT_S = {0: 1.0, 1: 5.0, 2: float("inf")}  # by class: interactive, standard, bulk
GAP_LIMIT_S = {0: 0.2, 1: 0.5, 2: float("inf")}  # longest silence within an answer
LOADS = (0.5, 0.8, 1.0, 1.2)

_FIRST_COME: dict[str, object] = {"policy": "fifo", "max_bypass": 0, "safety_margin": 0.0}
_CHUNKED: dict[str, object] = {
    "max_num_batched_tokens": 2_048,
    "long_prefill_token_threshold": 1_024,
    "max_num_partial_prefills": 0,
    "max_long_partial_prefills": 0,
}
# FCFS: first come, first served. Two sizes separate the effect of its large steps from that of its
# order.
POLICIES: dict[str, dict[str, object]] = {
    "fcfs, 8k": {**_FIRST_COME, "max_num_batched_tokens": 8_192},
    "fcfs, 2k": {**_FIRST_COME, "max_num_batched_tokens": 2_048},
    "fifo": {"policy": "fifo", **_CHUNKED},
    "priority": {"policy": "priority", **_CHUNKED},
}


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
    def is_complete(self) -> bool:
        return self.num_tokens == self.arrival.num_output_tokens

    @property
    def is_good(self) -> bool:
        rank, ttft_s = self.arrival.rank, self.ttft_s
        return (
            self.is_complete
            and ttft_s is not None
            and ttft_s <= TTFT_LIMIT_S[rank]
            and self.longest_gap_s <= GAP_LIMIT_S[rank]
        )

    def take(self, count: int, now: float) -> None:
        if self.last_at is not None:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
        self.first_at = self.first_at if self.first_at is not None else now
        self.last_at = now
        self.num_tokens += count


class SimulatedEngine:
    """Engine with the real scheduler.

    Args:
        settings: EngineConfig's.
        cache_tokens: size of the KV cache; None: as large as the device's memory allows.
        draw: makes so many tokens up.
    """

    def __init__(
        self,
        costs: CostModel,
        settings: dict[str, object],
        cache_tokens: int | None = None,
        draw: Callable[[int], Sequence[int]] = lambda count: (5,) * count,
    ) -> None:
        self.costs, self.now, self.steps, self._draw = costs, 0.0, 0, draw
        num_blocks = (cache_tokens or costs.num_cache_tokens) // BLOCK_SIZE
        fields: dict[str, object] = {"prefix_cache": False, "max_waiting": 10_000_000, **settings}
        config = EngineConfig(
            model="simulated",
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            **fields,  # type: ignore[arg-type]
        )
        group = LayerGroup((0,), 1, 1)
        cache = CacheConfig(BLOCK_SIZE, (group,), num_blocks, prefix_cache=config.prefix_cache)
        self.scheduler = Scheduler(
            config, cache, max_model_len=8_192, eos_token_ids=frozenset(), clock=lambda: self.now
        )

    def run(self, trace: Sequence[Arrival], until: float) -> list[Outcome]:
        """Serve the requests in order of arrival; those not finished at `until` stay unfinished."""
        outcomes = [Outcome(arrival) for arrival in trace]
        position = 0
        while self.now < until:
            while position < len(trace) and trace[position].at <= self.now:
                self.scheduler.add([_sequence(position, trace[position])])
                position += 1
            if (events := self.step()) is None:
                if position == len(trace):
                    break
                self.now = trace[position].at
            for event in events or ():
                outcomes[int(event.request_id)].take(len(event.token_ids), self.now)
        return outcomes

    def step(self) -> list[TokenEvent] | None:
        """Run a step and return its events that have tokens; None if nothing can run."""
        plan = self.scheduler.plan()
        if plan.is_empty:
            return None
        self.now += self.costs.step_s(plan)
        self.steps += 1
        count = sum(item.samples for item in plan.scheduled)
        tokens = tuple((token,) for token in self._draw(count))
        output = StepOutput(plan.step_id, tokens, (None,) * count, {})
        events = [event for event in self.scheduler.commit(plan, output) if event.token_ids]
        self.scheduler.take_released()
        return events


def _sequence(index: int, arrival: Arrival) -> EngineSequence:
    return EngineSequence(
        request_id=str(index),
        token_ids=[7] * arrival.num_prompt_tokens,
        num_prompt_tokens=arrival.num_prompt_tokens,
        params=SamplingParams(temperature=0, max_tokens=arrival.num_output_tokens, ignore_eos=True),
        priority=arrival.rank,
        tenant=arrival.tenant,
    )


def capacity(costs: CostModel, max_num_seqs: int, seed: int) -> float:
    """Return the requests per second, first come, first served, when requests always wait."""
    flood = [replace(arrival, at=0.0) for arrival in arrivals(100.0, 20.0, seed)]
    engine = SimulatedEngine(costs, {**POLICIES["fcfs, 8k"], "max_num_seqs": max_num_seqs})
    return len(engine.run(flood, until=float("inf"))) / engine.now


def measure(
    limit: float,
    loads: Sequence[float],
    seconds: float,
    max_num_seqs: int,
    seed: int,
    waiting: Callable[[str], None],
) -> dict[str, dict[str, dict[str, float]]]:
    """Simulate all policies at shares of the capacity `limit`, and return figures by load."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for load in loads:
        trace = arrivals(load * limit, seconds, seed)
        cases = results[f"load {load:g}"] = {}
        for name, settings in POLICIES.items():
            waiting(f"load {load:g}, {name}")
            engine = SimulatedEngine(CostModel(), {**settings, "max_num_seqs": max_num_seqs})
            cases[name] = figures(engine.run(trace, until=seconds * 1.5), seconds)
    return results


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, float]:
    """Compute the figures of one run; a missing answer has an infinite time to first token.

    Times to the first token and gaps are those of interactive requests.
    """
    interactive = [outcome for outcome in outcomes if outcome.arrival.rank == 0]
    bulk = [outcome for outcome in outcomes if outcome.arrival.rank == 2]
    ttft = [float("inf") if outcome.ttft_s is None else outcome.ttft_s for outcome in interactive]
    gaps = [outcome.longest_gap_s for outcome in interactive if outcome.num_tokens > 1]
    end = max([seconds, *(outcome.last_at or 0.0 for outcome in outcomes)])
    return {
        "goodput": sum(outcome.is_good for outcome in outcomes) / seconds,
        "offered": len(outcomes) / seconds,
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p99_s": percentile(ttft, 0.99),
        "gap_p99_ms": 1e3 * percentile(gaps, 0.99),
        "tokens_s": sum(outcome.num_tokens for outcome in outcomes) / end,
        "bulk_done": sum(outcome.is_complete for outcome in bulk) / max(1, len(bulk)),
    }
