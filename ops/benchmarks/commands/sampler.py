"""Measures the sampler alone: milliseconds per step on random logits, by sampling parameters.

`--spread` is the standard deviation of the logits. About 2.5 makes nuclei of thousands of tokens,
the hard case; language models are nearer to 5.
"""

import argparse
import statistics
import time

import torch

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.execution.build import pick_device
from tokenmill_worker.engine.plan import ScheduledSequence
from tokenmill_worker.engine.sampling import Sampler
from tokenmill_worker.engine.sequence import Sequence

WORKLOADS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, top 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "temperature": SamplingParams(temperature=0.8),
    "min_p": SamplingParams(min_p=0.05),
    "top_k 50": SamplingParams(top_k=50),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "temperature 0.7, top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "penalties": SamplingParams(
        frequency_penalty=0.2, presence_penalty=0.2, repetition_penalty=1.1
    ),
    "everything": SamplingParams(
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        min_p=0.02,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={1: 2.0, 2: -2.0},
        min_tokens=10_000,
        logprobs=5,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--spread", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--torch", action="store_true", help="draw through torch, as on a device")


def run(options: argparse.Namespace) -> dict[str, object]:
    own_device = pick_device(options.device)
    device = own_device.torch_device
    kernel = None if options.torch else own_device.token_kernel(EngineConfig(model="none"))
    sampler = Sampler(options.vocab, device, frozenset({2}), kernel=kernel)
    logits = (
        torch.randn(options.rows, options.vocab, generator=torch.Generator().manual_seed(0))
        * options.spread
    )
    logits = logits.to(device)
    figures: dict[str, dict[str, float]] = {}
    for name, params in WORKLOADS.items():
        items = [_item(params, seed, options.vocab) for seed in range(options.rows)]
        sampler.sample(logits, items).finish()
        times = [_time(sampler, logits, items) for _ in range(options.repeat)]
        figures[name] = {"median_ms": statistics.median(times), "best_ms": min(times)}
        print(
            f"{name:<28}{figures[name]['median_ms']:8.2f} ms median "
            f"{figures[name]['best_ms']:8.2f} ms best"
        )
        for item in items:
            sampler.release(item.sequence)
    return {"sampler": figures}


def _item(params: SamplingParams, seed: int, vocab: int) -> ScheduledSequence:
    """Build a sequence of 250 prompt and 250 output tokens."""
    token_ids = [((seed * 31 + i * 7) % 9_000 + 10) % vocab for i in range(500)]
    sequence = Sequence(f"r{seed}", token_ids, 250, params, seed=seed)
    return ScheduledSequence(sequence, 499, 1, True)


def _time(sampler: Sampler, logits: torch.Tensor, items: list[ScheduledSequence]) -> float:
    started = time.perf_counter()
    sampler.sample(logits, items).finish()
    return 1e3 * (time.perf_counter() - started)
