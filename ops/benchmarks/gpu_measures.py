"""What `ops/bench gpu` measures of one engine: decode by batch, drawn tokens, a long prefill, kernels and gaps, a mixed
load. It knows engines and shapes, not the order of a run.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from ops.benchmarks.device_ceilings import Ceilings, synchronise
from ops.benchmarks.device_gaps import profile_of
from ops.benchmarks.gpu_models import Shape
from ops.benchmarks.peers.ours import Tokenmill
from ops.benchmarks.workload_files import Workload, WorkloadRequest, generate
from worker.engine import Engine, EngineConfig, SamplingParams
from worker.engine.model.loader import LoadedModel
from worker.engine.runner import ModelRunner

SLACK = 64  # tokens that sequences make before the measured steps
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, top_k=100, seed=1, ignore_eos=True)


def configure(shape: Shape, options: argparse.Namespace, **changes: Any) -> EngineConfig:
    """Room for the largest batch and for the long prompt."""
    block, largest = changes.pop("block_size", 16), max(options.batch)
    tokens = max(largest * (options.context + options.steps + SLACK + 2 * block), options.prefill + 2 * block)
    fields: dict[str, Any] = {
        "model": "random weights", "dtype": options.dtype, "device": options.device, "block_size": block,
        "num_blocks": tokens // block + largest + 2, "max_num_seqs": largest, "prefix_cache": False,
        "max_num_batched_tokens": max(options.prefill, largest), "max_model_len": shape.max_position_embeddings,
    }  # fmt: skip
    return EngineConfig(**{**fields, **changes})


def engine_of(loaded: LoadedModel, config: EngineConfig) -> Engine:
    return Engine.around(ModelRunner.around(loaded, config))


def decode(
    engine: Engine, shape: Shape, batch: int, ceilings: Ceilings, options: argparse.Namespace, params: SamplingParams
) -> dict[str, float]:
    requests = _start(engine, shape, batch, options, params)
    times = []
    for _ in range(options.steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    synchronise(torch.device(options.device))
    _end(engine, requests)
    step_s = statistics.median(times)
    itemsize = getattr(torch, options.dtype).itemsize
    context = options.context + options.steps // 2
    moved = shape.num_weights * itemsize + batch * shape.kv_bytes(context, itemsize)
    computed = 2 * shape.num_weights * batch + shape.attention_operations(batch * context)
    floor_s = max(moved / ceilings.bytes_s, computed / ceilings.operations_s)
    return {
        "step_ms": 1e3 * step_s,
        "mean_step_ms": 1e3 * statistics.fmean(times),
        "tokens_s": batch / step_s,
        "share_of_bandwidth": moved / step_s / ceilings.bytes_s,
        "share_of_roofline": floor_s / step_s,
    }


def prefill(engine: Engine, shape: Shape, ceilings: Ceilings, options: argparse.Namespace) -> dict[str, float]:
    times = []
    for seed in range(4):
        started = time.perf_counter()
        engine.add_request(_prompt(shape, options.prefill, seed), SamplingParams(temperature=0, max_tokens=1))
        while engine.has_work:
            engine.step()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[1:])
    share = shape.prefill_operations(options.prefill) / seconds / ceilings.operations_s
    return {"seconds": seconds, "tokens_s": options.prefill / seconds, "share_of_operations": share}


def gaps(engine: Engine, shape: Shape, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    requests = _start(engine, shape, batch, options, GREEDY)
    found = profile_of(engine.step, torch.device(options.device), min(20, options.steps))
    _end(engine, requests)
    return found


def mixed_load(shape: Shape, share: float) -> Workload:
    """The mixed workload, its ids brought into the shape's vocabulary."""
    workload = generate("mixed", 0, share)
    return Workload(
        workload.name,
        tuple(
            WorkloadRequest(tuple(1 + token % (shape.vocab_size - 1) for token in request.prompt), request.max_tokens)
            for request in workload.requests
        ),
    )


class Ours(Tokenmill):
    """Around an engine that is there already."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.description = engine.runner.description


def _start(engine: Engine, shape: Shape, batch: int, options: argparse.Namespace, params: SamplingParams) -> list[str]:
    """So many sequences decode when this returns, graphs captured and caches warm."""
    limits = SamplingParams(
        temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, seed=params.seed, ignore_eos=True,
        max_tokens=options.steps + SLACK,
    )  # fmt: skip
    requests = engine.add_requests([_prompt(shape, options.context, seed) for seed in range(batch)], limits)
    seen: set[str] = set()
    while len(seen) < batch:
        seen |= {event.request_id for event in engine.step() if event.token_ids}
    for _ in range(3):
        engine.step()
    return requests


def _end(engine: Engine, requests: Sequence[str]) -> None:
    for request in requests:
        engine.cancel(request)
    while engine.has_work:
        engine.step()


def _prompt(shape: Shape, count: int, seed: int) -> tuple[int, ...]:
    return tuple(1 + (seed * 7919 + 31 * index) % (shape.vocab_size - 1) for index in range(count))
