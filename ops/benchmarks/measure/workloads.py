"""Workloads of five shapes, on which engines are compared.

Sampling is greedy, EOS is ignored, and all requests are present at the start. Ids are drawn evenly,
by a seed, from a range that every compared tokenizer has and that holds no special tokens.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

FIRST_ID, LAST_ID = 100, 40_000


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: tuple[WorkloadRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)

    def first(self, num_requests: int, max_tokens: int) -> "Workload":
        """Return a shortened workload for warming up."""
        few = self.requests[:num_requests]
        short = (WorkloadRequest(r.prompt, min(r.max_tokens, max_tokens)) for r in few)
        return Workload(f"{self.name} (short)", tuple(short))


Requests = tuple[WorkloadRequest, ...]


def decode(source: random.Random, share: float) -> Requests:
    """Generate short prompts with long answers: nearly every step is a batch of decodes."""
    return tuple(WorkloadRequest(_ids(source, 16), 128) for _ in range(_count(32, share)))


def mixed(source: random.Random, share: float) -> Requests:
    """Generate log-normal lengths, as in real traffic: medians 90 in and 45 out, clipped."""

    def draw(median: float, low: int, high: int) -> int:
        return max(low, min(high, round(source.lognormvariate(0.0, 0.9) * median)))

    return tuple(
        WorkloadRequest(_ids(source, draw(90, 16, 512)), draw(45, 8, 256))
        for _ in range(_count(64, share))
    )


def prefix(source: random.Random, share: float) -> Requests:
    """Generate prompts that share one long beginning and differ in a short rest."""
    shared = _ids(source, 512)
    return tuple(WorkloadRequest(shared + _ids(source, 32), 32) for _ in range(_count(64, share)))


def prefill(source: random.Random, share: float) -> Requests:
    """Generate prompts to read, with one output token each."""
    return tuple(WorkloadRequest(_ids(source, 1024), 1) for _ in range(_count(16, share)))


def single(source: random.Random, share: float) -> Requests:
    """Generate one single stream; `share` shortens its answer."""
    return (WorkloadRequest(_ids(source, 64), _count(128, share)),)


SHAPES: dict[str, Callable[[random.Random, float], Requests]] = {
    shape.__name__: shape for shape in (decode, mixed, prefix, prefill, single)
}


def generate(name: str, share: float = 1.0) -> Workload:
    """Generate a workload, the same each time; `share` scales the number of requests."""
    return Workload(name, SHAPES[name](random.Random(f"{name}/0"), share))


def _ids(source: random.Random, count: int) -> tuple[int, ...]:
    return tuple(source.randrange(FIRST_ID, LAST_ID) for _ in range(count))


def _count(full: int, share: float) -> int:
    return max(1, round(full * share))
