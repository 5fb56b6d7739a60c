"""Measurements of one engine for `ops/bench gpu`.

They are decode by batch size, drawn tokens, a long prefill, and a profile of kernels and gaps. The
order of a run is in commands/gpu.py.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ops.benchmarks.gpu.ceilings import synchronise
from ops.benchmarks.measure.step_floor import Ceilings, Shape, Work
from tokenmill_worker.engine import Engine, EngineConfig, SamplingParams
from tokenmill_worker.engine.execution.build import build_runner
from tokenmill_worker.engine.model.loader import LoadedModel

LEAST_SHARE = 0.02  # of the profiled time
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


def decode(
    engine: Engine,
    shape: Shape,
    batch: int,
    ceilings: Ceilings,
    options: argparse.Namespace,
    params: SamplingParams,
    long: int = 0,
) -> dict[str, float]:
    """Measure decode steps; `long`, if not 0, is the context length of one of the sequences.

    The floor is that of a step in the middle: the first sequences have grown while the last prompts
    were read.
    """
    contexts = [long or options.context, *[options.context] * (batch - 1)]
    requests = _start(engine, shape, contexts, options, params)
    times, before = [], _num_tokens(engine, requests)
    for _ in range(options.steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    synchronise(torch.device(options.device))
    read = (before + _num_tokens(engine, requests)) // 2
    _end(engine, requests)
    step_s = statistics.median(times)
    floor_s = shape.floor_s(ceilings, _work(engine, options, batch, batch, read, read))
    return {"tokens_s": batch / step_s, "ms": 1e3 * step_s, "share_of_floor": floor_s / step_s}


def _num_tokens(engine: Engine, requests: Sequence[str]) -> int:
    """Return the tokens of all these sequences: the next step reads their keys and values."""
    sequences = (each for request in requests for each in engine.scheduler.sequences(request))
    return sum(sequence.num_tokens for sequence in sequences)


def _work(
    engine: Engine, options: argparse.Namespace, tokens: int, sampled: int, read: int, pairs: int
) -> Work:
    kinds = (options.dtype, engine.runner.info.config.kv_dtype)
    weight_bytes, kv_bytes = (getattr(torch, name).itemsize for name in kinds)
    return Work(tokens, sampled, read, pairs, weight_bytes, kv_bytes)


def prefill(
    engine: Engine, shape: Shape, ceilings: Ceilings, options: argparse.Namespace
) -> dict[str, float]:
    times = []
    for seed in range(4):
        started = time.perf_counter()
        engine.add_request(
            prompt_ids(shape, options.prefill, seed), SamplingParams(temperature=0, max_tokens=1)
        )
        while engine.has_work:
            engine.step()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[1:])
    tokens = options.prefill
    work = _work(engine, options, tokens, 1, tokens, tokens * (tokens + 1) // 2)
    share = shape.floor_s(ceilings, work) / seconds
    return {"tokens_s": tokens / seconds, "ms": 1e3 * seconds, "share_of_floor": share}


def gaps(engine: Engine, shape: Shape, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Profile steps with torch's profiler."""
    device, steps = torch.device(options.device), min(20, options.steps)
    requests = _start(engine, shape, [options.context] * batch, options, GREEDY)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            engine.step()
        synchronise(device)
    _end(engine, requests)
    wanted = "CUDA" if device.type == "cuda" else "CPU"  # a CPU has operators and no kernels
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or ()
        if event.device_type.name == wanted and (wanted == "CUDA" or event.cpu_parent is None)
    ]
    return summarise(spans, steps)


def summarise(spans: Iterable[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Sum up spans (start, end, name), in microseconds, in any order; they may overlap.

    `busy` is the share of the time in which the device worked. `parts` has the milliseconds a step
    of kernels by name, and of gaps by the two kernels around them, largest first; those below
    LEAST_SHARE of the time are left out.
    """
    ordered = sorted(spans)
    if not ordered:
        return {"busy": 0.0, "parts": {}}
    worked: defaultdict[str, float] = defaultdict(float)
    idle: defaultdict[str, float] = defaultdict(float)
    first, reached, last = ordered[0]
    for start, end, name in ordered:
        worked[name] += end - start
        if start > reached:
            idle[f"gap: {last} → {name}"] += start - reached
        if end >= reached:
            reached, last = end, name
    whole = reached - first
    took = sorted([*worked.items(), *idle.items()], key=lambda pair: -pair[1])
    parts = {name: us / 1e3 / steps for name, us in took if us > LEAST_SHARE * whole}
    return {"busy": 1.0 - sum(idle.values()) / whole, "ms": whole / 1e3 / steps, "parts": parts}


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
        [prompt_ids(shape, count, seed) for seed, count in enumerate(contexts)], limits
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


def prompt_ids(shape: Shape, count: int, seed: int) -> tuple[int, ...]:
    return tuple(1 + (seed * 7919 + 31 * index) % (shape.vocab_size - 1) for index in range(count))
