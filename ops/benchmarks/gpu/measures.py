"""Measurements of one engine for `ops/bench gpu`.

They are decode by batch size, drawn tokens, a long prefill, kernels and gaps, and a mixed load. The
order of a run is in gpu.py.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from ops.benchmarks.gpu.ceilings import Ceilings, synchronise
from ops.benchmarks.gpu.gaps import profile_of
from ops.benchmarks.gpu.models import Shape
from ops.benchmarks.measure.workload_files import Workload, WorkloadRequest, generate
from ops.benchmarks.peers.ours import Tokenmill
from tokenmill_worker.engine import Engine, EngineConfig, SamplingParams
from tokenmill_worker.engine.execution.build import build_runner
from tokenmill_worker.engine.model.loader import LoadedModel

SPARE = 16  # tokens that sequences may produce besides those that are measured
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, top_k=100, seed=1, ignore_eos=True)


def configure(shape: Shape, options: argparse.Namespace, **changes: Any) -> EngineConfig:
    """Return a configuration with room for the largest batch and for the long prompt.

    One sequence of the batch may be `long` tokens long.
    """
    block, long, largest = changes.pop("block_size", 16), changes.pop("long", 0), max(options.batch)
    budget = max(options.prefill, 2 * largest)
    prompts = largest * options.context + long
    each = options.steps + headroom(prompts, largest, budget) + 2 * block
    tokens = max(prompts + largest * each, options.prefill + 2 * block)
    fields: dict[str, Any] = {
        "model": "random weights", "dtype": options.dtype, "device": options.device,
        "block_size": block,
        "num_blocks": tokens // block + largest + 2, "max_num_seqs": largest, "prefix_cache": False,
        "max_num_batched_tokens": budget, "max_model_len": shape.max_position_embeddings,
    }  # fmt: skip
    return EngineConfig(**{**fields, **changes})


def headroom(prompt_tokens: int, batch: int, budget: int) -> int:
    """Return how many tokens a sequence needs beyond those measured.

    The first sequence produces at most that many before the last prompt is read; a margin is
    included.
    """
    return -(-prompt_tokens // (budget - batch)) + SPARE


def engine_of(loaded: LoadedModel, config: EngineConfig) -> Engine:
    return Engine.around(build_runner(loaded, config))


def scatter(engine: Engine) -> None:
    """Shuffle the free blocks of all pools.

    Consecutive blocks of a sequence then lie anywhere in the pool, as in a service that has run for
    a while.
    """
    for pool in engine.scheduler.kv.pools:
        blocks = [pool.allocate() for _ in range(pool.num_free)]
        random.Random(0).shuffle(blocks)
        for block in blocks:
            pool.release(block)


def decode(
    engine: Engine,
    shape: Shape,
    batch: int,
    ceilings: Ceilings,
    options: argparse.Namespace,
    params: SamplingParams,
    long: int = 0,
) -> dict[str, float]:
    """Measure decode steps; `long`, if not 0, is the context length of one of the sequences."""
    contexts = [long or options.context, *[options.context] * (batch - 1)]
    requests = _start(engine, shape, contexts, options, params)
    times = []
    for _ in range(options.steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    synchronise(torch.device(options.device))
    _end(engine, requests)
    step_s = statistics.median(times)
    weights, kept = (
        getattr(torch, name).itemsize
        for name in (options.dtype, engine.runner.info.config.kv_dtype)
    )
    read = sum(contexts) + batch * options.steps // 2
    moved = shape.num_weights * weights + shape.kv_bytes(read, kept)
    computed = 2 * shape.num_weights * batch + shape.attention_operations(read)
    floor_s = max(moved / ceilings.bytes_s, computed / ceilings.operations_s)
    return {
        "step_ms": 1e3 * step_s,
        "mean_step_ms": 1e3 * statistics.fmean(times),
        "tokens_s": batch / step_s,
        "share_of_bandwidth": moved / step_s / ceilings.bytes_s,
        "share_of_roofline": floor_s / step_s,
    }


def prefill(
    engine: Engine, shape: Shape, ceilings: Ceilings, options: argparse.Namespace
) -> dict[str, float]:
    times = []
    for seed in range(4):
        started = time.perf_counter()
        engine.add_request(
            _prompt(shape, options.prefill, seed), SamplingParams(temperature=0, max_tokens=1)
        )
        while engine.has_work:
            engine.step()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[1:])
    share = shape.prefill_operations(options.prefill) / seconds / ceilings.operations_s
    return {"seconds": seconds, "tokens_s": options.prefill / seconds, "share_of_operations": share}


def gaps(engine: Engine, shape: Shape, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    requests = _start(engine, shape, [options.context] * batch, options, GREEDY)
    found = profile_of(engine.step, torch.device(options.device), min(20, options.steps))
    _end(engine, requests)
    return found


def mixed_load(shape: Shape, share: float) -> Workload:
    """Generate the mixed workload, with its token ids mapped into the shape's vocabulary."""
    workload = generate("mixed", 0, share)
    return Workload(
        workload.name,
        tuple(
            WorkloadRequest(
                tuple(1 + token % (shape.vocab_size - 1) for token in request.prompt),
                request.max_tokens,
            )
            for request in workload.requests
        ),
    )


class Ours(Tokenmill):
    """Measured engine around an engine that exists already."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.description = engine.runner.info.description


def _start(
    engine: Engine,
    shape: Shape,
    contexts: Sequence[int],
    options: argparse.Namespace,
    params: SamplingParams,
) -> list[str]:
    """Start sequences of these lengths.

    When this returns, all of them decode, graphs are captured and caches are warm.
    """
    spare = headroom(sum(contexts), len(contexts), engine.runner.info.config.max_num_batched_tokens)
    limits = SamplingParams(
        temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, seed=params.seed,
        ignore_eos=True,
        max_tokens=options.steps + spare,
    )  # fmt: skip
    requests = engine.add_requests(
        [_prompt(shape, count, seed) for seed, count in enumerate(contexts)], limits
    )
    seen: set[str] = set()
    while len(seen) < len(contexts):
        seen |= {event.request_id for event in engine.step() if event.token_ids}
    for _ in range(3):
        engine.step()
    return requests


def _end(engine: Engine, requests: Sequence[str]) -> None:
    """Cancel the sequences.

    Raises RuntimeError if one had ended already: the batch was then smaller than reported.
    """
    still = sum(engine.cancel(request) for request in requests)
    while engine.has_work:
        engine.step()
    if still < len(requests):
        raise RuntimeError(f"{len(requests) - still} sequences ended while they were measured")


def _prompt(shape: Shape, count: int, seed: int) -> tuple[int, ...]:
    return tuple(1 + (seed * 7919 + 31 * index) % (shape.vocab_size - 1) for index in range(count))
