"""Generates arrivals like those of real services: bursts, log-normal lengths, classes and tenants.

The sequence is seeded. The medians (1,020 tokens in, 129 out) are those published for a large
conversation service; spread and burstiness are our own choice and rather high. Bulk jobs are
longer.
"""

import random
from dataclasses import dataclass

BURST_S = 5.0
MAX_PROMPT, MAX_ANSWER = 7_000, 1_000


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    rank: int = 1  # 0 interactive, 1 standard, 2 bulk
    tenant: str = "t"


def arrivals(rate: float, seconds: float, seed: int = 0) -> list[Arrival]:
    """Draw arrivals at `rate` per second on average, in bursts.

    Every few seconds the rate changes by another factor (gamma distribution, coefficient of
    variation 0.7). The bursts are the same for every rate, so that loads can be compared.
    """
    bursts, source = random.Random(f"bursts/{seed}"), random.Random(f"requests/{seed}")
    factors = [bursts.gammavariate(2.0, 0.5) for _ in range(max(1, round(seconds / BURST_S)))]
    mean = sum(factors) / len(factors)
    found: list[Arrival] = []
    for number, factor in enumerate(factors):
        start = now = number * BURST_S
        while (now := now + source.expovariate(rate * factor / mean)) < min(
            start + BURST_S, seconds
        ):
            found.append(_arrival(now, source))
    return found


def _arrival(at: float, source: random.Random) -> Arrival:
    rank = source.choices((0, 1, 2), weights=(5, 3, 2))[0]
    longer = 1.5 if rank == 2 else 1.0
    return Arrival(
        at=at,
        num_prompt_tokens=draw_length(source, 1_020 * longer, 0.8, MAX_PROMPT),
        num_output_tokens=answer_length(source, longer),
        rank=rank,
        tenant=f"tenant-{min(int(source.paretovariate(1.2)), 20)}",
    )


def answer_length(source: random.Random, factor: float = 1.0) -> int:
    return draw_length(source, 129 * factor, 0.9, MAX_ANSWER)


def draw_length(source: random.Random, median: float, sigma: float, limit: int) -> int:
    return max(4, min(limit, round(median * source.lognormvariate(0.0, sigma))))
