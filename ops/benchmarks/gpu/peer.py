"""Runs the mixed load on our engine and on Transformers' continuous batching, in turns.

Each has a model of its own with the same weights and a pool of the same size. Both live in this
process and on its device.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ops.benchmarks.compare.rounds import Measurement
from ops.benchmarks.gpu.measures import configure, engine_of
from ops.benchmarks.gpu.models import random_model
from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine
from ops.benchmarks.measure.step_floor import Shape
from ops.benchmarks.measure.workload_files import Workload, WorkloadRequest, generate
from ops.benchmarks.peers.ours import Tokenmill
from ops.benchmarks.peers.transformers_batching import TransformersBatching
from tokenmill_worker.engine import Engine
from tokenmill_worker.engine.model.loader import LoadedModel

POOL_TOKENS = 131_072
PEER_ATTENTION = "sdpa"  # the attention that it has without further packages


class Ours(Tokenmill):
    """Measured engine around an engine that exists already."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.description = engine.runner.info.description


def beside(
    shape: Shape,
    options: argparse.Namespace,
    loaded: LoadedModel,
    deadline: float,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure both engines; `keep` receives the results so far after each run.

    Raises TimeoutError at `deadline`, a time of the monotonic clock.
    """
    load = mixed_load(shape, options.share)
    largest = max(options.batch)
    pool, budget = min(POOL_TOKENS, largest * 1024), min(8192, options.prefill)
    config = configure(
        shape,
        options,
        num_blocks=pool // 16,
        max_num_batched_tokens=budget,
        prefix_cache=True,
    )
    given = EngineOptions("", options.dtype, 0, pool, budget, largest)
    theirs = random_model(shape, options.device, getattr(torch, options.dtype))
    theirs.set_attn_implementation(PEER_ATTENTION)
    with engine_of(loaded, config) as engine:
        ours, peer = Ours(engine), TransformersBatching(given, theirs, deadline)
        ours.run(load.requests)  # compiles, captures graphs
        peer.run(load.first(8, 8).requests)
        return take_turns({"tokenmill": ours, "transformers": peer}, load, options.rounds, keep)


def mixed_load(shape: Shape, share: float) -> Workload:
    """Generate the mixed workload, with its token ids mapped into the shape's vocabulary."""
    workload = generate("mixed", share)
    requests = (
        WorkloadRequest(
            tuple(1 + token % (shape.vocab_size - 1) for token in r.prompt), r.max_tokens
        )
        for r in workload.requests
    )
    return Workload(workload.name, tuple(requests))


def take_turns(
    contenders: Mapping[str, MeasuredEngine],
    load: Workload,
    rounds: int,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Return our tokens per second, how many times the peer's they are, and the equal answers.

    In half precision the best two tokens may tie, so answers may differ.
    """
    measurement = Measurement(load, tuple(contenders))
    found: dict[str, Any] = {"peer": contenders["transformers"].description}
    for _ in range(rounds):
        for name, contender in contenders.items():
            measurement.add(name, contender.run(load.requests))
            if results := measurement.results():
                theirs = results["transformers"]
                found |= {"tokens_s": results["tokenmill"]["output_tok_s"]}
                found |= {"times_transformers": theirs["ratio"], "same": theirs["same"]}
            keep(found | {"rounds": measurement.rounds})
    return found | {"rounds": measurement.rounds}
