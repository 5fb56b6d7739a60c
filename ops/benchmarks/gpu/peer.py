"""Runs the mixed load on our engine and on Transformers' continuous batching, in turns.

Each has a model of its own with the same weights and a pool of the same size. Both live in this
process and on its device.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from ops.benchmarks.gpu.measures import Ours, configure, engine_of, mixed_load
from ops.benchmarks.gpu.models import Shape, random_model
from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine
from ops.benchmarks.measure.workload_files import Workload
from ops.benchmarks.peers.transformers_batching import TransformersBatching
from tokenmill_worker.engine.model.loader import LoadedModel

POOL_TOKENS = 131_072
PEER_ATTENTION = "sdpa"  # the attention that it has without further packages


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
    pool = min(POOL_TOKENS, largest * 1024)
    config = configure(
        shape,
        options,
        num_blocks=pool // 16 + 1,
        max_num_batched_tokens=min(8192, options.prefill),
        prefix_cache=True,
    )
    engine = engine_of(loaded, config)
    theirs = random_model(shape, options.device, getattr(torch, options.dtype))
    theirs.set_attn_implementation(PEER_ATTENTION)
    given = EngineOptions(
        model="", dtype=options.dtype, pool_tokens=pool,
        max_batch_tokens=config.max_num_batched_tokens,
        max_sequences=largest,
    )  # fmt: skip
    contenders: dict[str, MeasuredEngine] = {
        "tokenmill": Ours(engine), "transformers": TransformersBatching(given, theirs, deadline),
    }  # fmt: skip
    try:
        contenders["tokenmill"].run(load.requests)  # compiles, captures graphs
        contenders["transformers"].run(load.first(8, 8).requests)
        return take_turns(contenders, load, options.rounds, keep)
    finally:
        engine.stop(drain=False)


def take_turns(
    contenders: dict[str, MeasuredEngine],
    load: Workload,
    rounds: int,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, list[list[int]]] = {}
    record: dict[str, Any] = {
        "requests": len(load.requests),
        "peer": contenders["transformers"].description,
    }
    for _ in range(rounds):
        for name, contender in contenders.items():
            measured = contender.run(load.requests)
            found[name].append(sum(len(tokens) for tokens in measured.tokens) / measured.wall_s)
            answers[name] = measured.tokens
            medians = {name: statistics.median(rates) for name, rates in found.items() if rates}
            record |= {"tokens_s": medians, "rounds": found}
            if len(medians) == len(found):
                record["times_transformers"] = medians["tokenmill"] / medians["transformers"]
                record["equal_answers"] = _equal(answers)
            keep(record)
    return record


def _equal(answers: dict[str, list[list[int]]]) -> float:
    """Return the share of answers that are equal to the last token.

    In half precision the best two tokens may tie, so answers may differ.
    """
    ours, theirs = answers.values()
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
