"""Compares what the settings of a short cache cost: the margin that a start leaves free, and the
choice of the preempted sequence.

The cache holds few of the requests of each trace, so that answers outgrow it. The scheduler is the
real one; times are those of the cost model.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.engine import SimulatedEngine
from ops.benchmarks.simulation.load import Arrival, answer_length, arrivals

CACHE_TOKENS = 30_000
SETTINGS: dict[str, dict[str, object]] = {
    "default": {},
    "margin 0": {"safety_margin": 0.0},
    "margin 0.2": {"safety_margin": 0.2},
    "newest": {"preempt": "newest"},
    "oldest": {"preempt": "oldest"},
}


def traces(seed: int) -> dict[str, list[Arrival]]:
    """Return the three loads; each has more requests than the cache holds."""
    source = random.Random(f"memory/{seed}")
    long_beside_short = [
        _arrival(0.06 * number, prompt, 128)
        for number in range(64)
        for prompt in (source.randint(4_000, 7_000), source.randint(64, 256))
    ]
    long_answers = [_arrival(0.0, 128, answer_length(source, 8.0)) for _ in range(128)]
    conversation = [replace(one, rank=1) for one in arrivals(8.0, 30.0, seed)]
    return {
        "64 long prompts beside 64 short": long_beside_short,
        "128 long answers": long_answers,
        "conversations, 8 requests/s": conversation,
    }


def _arrival(at: float, num_prompt_tokens: int, num_output_tokens: int) -> Arrival:
    return Arrival(at, num_prompt_tokens, num_output_tokens, rank=1, tenant="t")


def measure(
    max_num_seqs: int, seed: int, waiting: Callable[[str], None]
) -> dict[str, dict[str, dict[str, float]]]:
    """Run each trace with each setting, and return figures by trace."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, trace in traces(seed).items():
        for case, settings in SETTINGS.items():
            waiting(f"{name}, {case}")
            results.setdefault(name, {})[case] = _figures(trace, settings, max_num_seqs)
    return results


def _figures(
    trace: Sequence[Arrival], settings: dict[str, object], max_num_seqs: int
) -> dict[str, float]:
    limits = {"max_num_batched_tokens": 2_048, "max_num_seqs": max_num_seqs}
    engine = SimulatedEngine(CostModel(), {**limits, **settings}, CACHE_TOKENS)
    outcomes = engine.run(trace, until=float("inf"))
    ttft = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    return {
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p99_s": percentile(ttft, 0.99),
        "gap_p99_ms": 1e3 * percentile([outcome.longest_gap_s for outcome in outcomes], 0.99),
        "tokens_s": sum(outcome.num_tokens for outcome in outcomes) / engine.now,
        "preemptions": engine.scheduler.stats.preemptions,
        "recomputed": engine.scheduler.stats.recomputed_tokens,
    }
