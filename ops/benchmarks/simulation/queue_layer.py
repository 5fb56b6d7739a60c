"""Simulates one queue server and many workers in virtual time, to find the server's limit.

The backlog never ends: every finished job is replaced by a submitted one, and every free place is
claimed for. The speed of the devices alone is known, so any loss is due to the queue.
"""

import random
from dataclasses import dataclass, field
from functools import cache

from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.queue_load import CUTTINGS, TOKENS, Cutting, Mix, Observations
from ops.benchmarks.simulation.queue_server import Clock, QueueServer, ScriptCosts
from ops.benchmarks.simulation.queue_worker import Worker

MIXES = (Mix("short prompts", 64, 220), Mix("long prompts", 1_350, 1_500))
SETTLE_S, SETTLE_PER_WORKER_S = (
    4.0,
    0.4,
)  # not counted: at first, the workers of an overloaded queue fill their buffers
NO_COSTS = ScriptCosts(
    0.0, dict.fromkeys((cutting.tokens for cutting in CUTTINGS), 0.0), *(0.0,) * 8
)


@dataclass(frozen=True, slots=True)
class QueueResult:
    """Result of one simulation; times in seconds.

    `offered_tokens_s` is the devices' speed beside a queue that takes no time.
    """

    num_workers: int
    tokens_s: float
    offered_tokens_s: float
    jobs_s: float
    busy: dict[str, float] = field(default_factory=dict)  # share of the server's thread, by script
    claims_s: tuple[float, ...] = ()
    added_s: tuple[
        float, ...
    ] = ()  # per append, from its step's end to the publication of its chunks
    beats_s: tuple[float, ...] = ()

    @property
    def utilisation(self) -> float:
        return sum(self.busy.values())

    @property
    def speed(self) -> float:
        """Tokens per second as a share of what the devices could make."""
        return self.tokens_s / self.offered_tokens_s

    def times_ms(self) -> dict[str, float]:
        kinds = {"claim": self.claims_s, "added": self.added_s, "heartbeat": self.beats_s}
        return {
            f"{kind}_p{share}_ms": 1e3 * percentile(times, share / 100)
            for kind, times in kinds.items()
            for share in (50, 99)
        }


def simulate(
    num_workers: int,
    mix: Mix,
    cutting: Cutting,
    costs: ScriptCosts,
    seconds: float = 0.0,
    seed: int = 0,
) -> QueueResult:
    """Simulate a queue; `seconds` of virtual time are counted.

    The default is longer for fewer workers, because there are fewer to average over.
    """
    seconds = seconds or 8.0 + 40.0 / num_workers
    source = random.Random(f"queue/{seed}")
    clock, device = Clock(), CostModel()
    since = SETTLE_S + SETTLE_PER_WORKER_S * num_workers
    server = QueueServer(clock, since, since + seconds)
    seen = Observations(since)

    def replace(finished: int) -> None:
        for _ in range(finished):
            server.call(
                "submit", costs.submit
            )  # it wakes no worker: none is in the idle-worker set while jobs wait

    for number in range(num_workers):
        worker = Worker(server, costs, device, mix, cutting, seen, source, replace)
        worker.start(0.02 * number / num_workers)
    clock.run(since + seconds)
    return QueueResult(
        num_workers,
        tokens_s=seen.tokens / seconds,
        offered_tokens_s=num_workers * device_tokens_s(mix)
        if costs is not NO_COSTS
        else seen.tokens / seconds,
        jobs_s=seen.jobs / seconds,
        busy={script: busy / seconds for script, busy in sorted(server.busy.items())},
        claims_s=tuple(seen.claims_s),
        added_s=tuple(seen.added_s),
        beats_s=tuple(seen.beats_s),
    )


@cache
def device_tokens_s(mix: Mix) -> float:
    """Return the tokens per second of one worker beside a server that takes no time."""
    return simulate(4, mix, TOKENS, NO_COSTS, seconds=24.0).tokens_s / 4
