"""Measures one engine for `ops/bench gpu`; the order of a run is in commands/gpu.py."""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from ops.benchmarks.gpu.ceilings import synchronise
from ops.benchmarks.measure.generation import generate, submit
from ops.benchmarks.measure.step_floor import Ceilings, Shape, Work
from tokenmill_worker.engines.own import EngineConfig, SamplingParams
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.execution.build import build_runner
from tokenmill_worker.engines.own.model.loader import LoadedModel

SPARE = 16  # tokens that sequences may produce besides those that are measured
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, top_k=100, seed=1, ignore_eos=True)


def configure(shape: Shape, options: argparse.Namespace, **changes: Any) -> EngineConfig:
    """Return a configuration with room for the largest batch and for the long prompt."""
    block, largest = changes.pop("block_size", 16), max(options.batch)
    budget = max(options.prefill, 2 * largest)
    prompts = largest * options.context
    each = options.steps + headroom(prompts, largest, budget) + 2 * block
    tokens = max(prompts + largest * each, options.prefill + 2 * block)
    fields: dict[str, Any] = {
        "model": "random weights", "dtype": options.dtype, "device": options.device,
        "block_size": block,
        "num_blocks": tokens // block + largest + 1, "max_num_seqs": largest, "prefix_cache": False,
        "max_num_batched_tokens": budget, "max_model_len": shape.max_position_embeddings,
    }  # fmt: skip
    return EngineConfig(**{**fields, **changes})


def headroom(prompt_tokens: int, batch: int, budget: int) -> int:
    """Return how many tokens a sequence needs beyond those measured.

    The first sequence produces at most that many before the last prompt is read; a margin is
    included.
    """
    return -(-prompt_tokens // (budget - batch)) + SPARE


@contextmanager
def engine_of(loaded: LoadedModel, config: EngineConfig) -> Iterator[Engine]:
    engine = Engine.around(build_runner(loaded, config))
    try:
        yield engine
    finally:
        engine.stop(drain=False)


@dataclass(frozen=True, slots=True)
class EngineMeasures:
    """Measures one engine: decode by batch size and a long prefill."""

    engine: Engine
    shape: Shape
    ceilings: Ceilings
    options: argparse.Namespace

    def decode(self, batch: int, params: SamplingParams = GREEDY) -> dict[str, float]:
        """Measure decode steps.

        The floor is that of a step in the middle: the first sequences have grown while the last
        prompts were read.
        """
        requests = self._start(batch, params)
        times, before = [], self._num_tokens(requests)
        for _ in range(self.options.steps):
            started = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - started)
        synchronise(torch.device(self.options.device))
        read = (before + self._num_tokens(requests)) // 2
        self._end(requests)
        return self._figures(batch, statistics.median(times), self._work(batch, batch, read, read))

    def drawn(self, batch: int) -> dict[str, float]:
        return self.decode(batch, DRAWN)

    def prefill(self) -> dict[str, float]:
        tokens, times = self.options.prefill, []
        once = SamplingParams(temperature=0, max_tokens=1)
        for seed in range(4):
            started = time.perf_counter()
            generate(self.engine, [prompt_ids(self.shape, tokens, seed)], [once])
            times.append(time.perf_counter() - started)
        work = self._work(tokens, 1, tokens, tokens * (tokens + 1) // 2)
        return self._figures(tokens, statistics.median(times[1:]), work)

    def _start(self, batch: int, params: SamplingParams) -> list[str]:
        """Start sequences of `options.context` tokens.

        When this returns, all of them decode, graphs are captured and caches are warm.
        """
        count, budget = self.options.context, self.engine.runner.info.config.max_num_batched_tokens
        spare = headroom(batch * count, batch, budget)
        limits = msgspec.structs.replace(params, max_tokens=self.options.steps + spare)
        prompts = [prompt_ids(self.shape, count, seed) for seed in range(batch)]
        requests = submit(self.engine, prompts, [limits] * batch)
        seen: set[str] = set()
        while len(seen) < batch:
            seen |= {event.request_id for event in self.engine.step() if event.token_ids}
        for _ in range(3):
            self.engine.step()
        return requests

    def _end(self, requests: Sequence[str]) -> None:
        """Cancel the sequences.

        Raises RuntimeError if one had ended already: the batch was then smaller than reported.
        """
        still = sum(self.engine.cancel(request) for request in requests)
        while self.engine.has_work:
            self.engine.step()
        if still < len(requests):
            raise RuntimeError(f"{len(requests) - still} sequences ended while they were measured")

    def _num_tokens(self, requests: Sequence[str]) -> int:
        """Return the tokens of all these sequences: the next step reads their keys and values."""
        scheduler = self.engine.scheduler
        return sum(each.num_tokens for name in requests for each in scheduler.sequences(name))

    def _work(self, tokens: int, sampled: int, read: int, pairs: int) -> Work:
        kinds = (self.options.dtype, self.engine.runner.info.config.kv_dtype)
        weight_bytes, kv_bytes = (getattr(torch, name).itemsize for name in kinds)
        return Work(tokens, sampled, read, pairs, weight_bytes, kv_bytes)

    def _figures(self, tokens: int, seconds: float, work: Work) -> dict[str, float]:
        share = self.shape.floor_s(self.ceilings, work) / seconds
        return {"tokens_s": tokens / seconds, "ms": 1e3 * seconds, "share_of_floor": share}


def prompt_ids(shape: Shape, count: int, seed: int) -> tuple[int, ...]:
    return tuple(1 + (seed * 7919 + 31 * index) % (shape.vocab_size - 1) for index in range(count))
