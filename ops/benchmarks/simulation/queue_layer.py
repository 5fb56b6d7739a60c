"""Simulates one queue server under many workers, to find how many of them it carries.

The speed of the devices alone is known, so any loss is due to the queue.
"""

import random
from collections.abc import Callable
from functools import cache

from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.simulation.queue_server import Clock, QueueServer, ScriptCosts
from ops.benchmarks.simulation.queue_worker import ANSWERS, Answers, Mix, Observations, Worker

MIXES = {"short prompts": Mix(64, 220), "long prompts": Mix(1_350, 1_500)}
SHOWN = (8, 16, 32, 64)  # numbers of workers
KEPT = 0.95  # share of the devices' tokens per second; below it, the server is the limit
SETTLE_S, SETTLE_PER_WORKER_S = 4.0, 0.4  # not counted: the workers' buffers fill


def measure(
    costs: ScriptCosts, waiting: Callable[[str], None]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return figures by mix of jobs and kind of answers."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for mix_name, mix in MIXES.items():
        cases = results[mix_name] = {}
        for name, answers in ANSWERS.items():
            waiting(f"one queue, {mix_name}, {name}")
            found = {count: simulate(count, mix, answers, costs) for count in SHOWN}
            kept = {count: figures["kept"] for count, figures in found.items()}
            cases[name] = {
                "carried": carried(mix, answers, costs, kept),
                **{f"kept_{count}": share for count, share in kept.items()},
                "server_8": found[8]["server"],
                "added_p50_ms": found[SHOWN[-1]]["added_p50_ms"],
            }
    return results


def carried(mix: Mix, answers: Answers, costs: ScriptCosts, kept: dict[int, float]) -> int:
    """Return the largest number of workers that one server does not slow down.

    Args:
        kept: shares of the devices' speed that were found already, by number of workers.
    """
    low = max((count for count, share in kept.items() if share >= KEPT), default=0)
    high = min((count for count in kept if count > low), default=low + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if simulate(middle, mix, answers, costs)["kept"] >= KEPT:
            low = middle
        else:
            high = middle
    return low


def simulate(
    num_workers: int,
    mix: Mix,
    answers: Answers,
    costs: ScriptCosts,
    seconds: float = 0.0,
    seed: int = 0,
) -> dict[str, float]:
    """Simulate a queue and return its figures; `seconds` of virtual time are counted.

    The default is longer for fewer workers, because there are fewer to average over.
    """
    seen, server, seconds = _run(num_workers, mix, answers, costs, seconds, seed)
    offered = num_workers * device_tokens_s(mix)
    return {
        "tokens_s": seen.tokens / seconds,
        "jobs_s": seen.jobs / seconds,
        "kept": seen.tokens / seconds / offered,
        "server": sum(server.busy.values()) / seconds,
        **{f"busy_{script}": busy / seconds for script, busy in sorted(server.busy.items())},
        "added_p50_ms": 1e3 * percentile(seen.added_s, 0.5),
    }


@cache
def device_tokens_s(mix: Mix) -> float:
    """Return the tokens per second of one worker beside a server that takes no time."""
    seen, _, seconds = _run(4, mix, Answers(), ScriptCosts(), 24.0, 0)
    return seen.tokens / seconds / 4


def _run(
    num_workers: int, mix: Mix, answers: Answers, costs: ScriptCosts, seconds: float, seed: int
) -> tuple[Observations, QueueServer, float]:
    seconds = seconds or 8.0 + 40.0 / num_workers
    source, clock = random.Random(f"queue/{seed}"), Clock()
    since = SETTLE_S + SETTLE_PER_WORKER_S * num_workers
    server, seen = QueueServer(clock, since, since + seconds), Observations(since)
    for number in range(num_workers):
        worker = Worker(server, costs, mix, answers, seen, source)
        worker.start(0.02 * number / num_workers)
    clock.run(since + seconds)
    return seen, server, seconds
