"""The mixed load, our engine beside Transformers' continuous batching: in turn, on two models with the same weights.

Both live in this process and on its device, each with a pool of the same size.
"""

import argparse
import statistics
from typing import Any

import torch

from ops.benchmarks.gpu_measures import Ours, configure, engine_of, mixed_load
from ops.benchmarks.gpu_models import Shape, describe, random_model
from ops.benchmarks.peers.protocol import EngineOptions, MeasuredEngine
from ops.benchmarks.peers.transformers_batching import TransformersBatching

POOL_TOKENS = 131_072
PEER_ATTENTION = "sdpa"  # what it has without further packages


def beside(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    load = mixed_load(shape, options.share)
    largest = max(options.batch)
    pool = min(POOL_TOKENS, largest * 1024)
    config = configure(
        shape, options, num_blocks=pool // 16 + 1, max_num_batched_tokens=min(8192, options.prefill), prefix_cache=True
    )
    dtype = getattr(torch, options.dtype)
    engine = engine_of(describe(random_model(shape, options.device, dtype), config), config)
    theirs = random_model(shape, options.device, dtype)
    theirs.set_attn_implementation(PEER_ATTENTION)
    given = EngineOptions(
        model="", dtype=options.dtype, pool_tokens=pool, max_batch_tokens=config.max_num_batched_tokens,
        max_sequences=largest,
    )  # fmt: skip
    contenders: dict[str, MeasuredEngine] = {
        "tokenmill": Ours(engine), "transformers": TransformersBatching(given, theirs),
    }  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, list[list[int]]] = {}
    try:
        contenders["tokenmill"].run(load.requests)  # compiles, captures
        contenders["transformers"].run(load.first(8, 8).requests)
        for _ in range(options.rounds):
            for name, contender in contenders.items():
                measured = contender.run(load.requests)
                found[name].append(sum(len(tokens) for tokens in measured.tokens) / measured.wall_s)
                answers[name] = measured.tokens
    finally:
        engine.stop(drain=False)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    return {
        "requests": len(load.requests),
        "tokens_s": medians,
        "rounds": found,
        "times_transformers": medians["tokenmill"] / medians["transformers"],
        "equal_answers": _equal(answers),
        "peer": contenders["transformers"].description,
    }


def _equal(answers: dict[str, list[list[int]]]) -> float:
    """Share of answers that are the same to the last token: in half precision the best two tokens may tie."""
    ours, theirs = answers.values()
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
