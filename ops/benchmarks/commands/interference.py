"""`ops/bench interference`: how a long prompt delays running streams and a short prompt after it.

Some streams decode; a long prompt arrives, and in the next step a short one. Measured are the time
per output token of the streams before and during the long prefill, their longest silence, and the
short prompt's time to first token, in milliseconds and in steps. The chunk size bounds a step, so
these figures follow `--chunk`.
"""

import argparse
import statistics
import time
from typing import Any

from rich.console import Console

from ops.benchmarks.measure.figures import alternate, medians
from ops.benchmarks.measure.tables import show
from tokenmill_worker.engine import Engine, EngineConfig, SamplingParams

SHOWN = {
    "tpot_before_ms": "streams, ms per token before",
    "tpot_during_ms": "streams, ms per token during the prefill",
    "silence_ms": "longest silence of a stream, ms",
    "short_ttft_ms": "short prompt's time to first token, ms",
    "short_ttft_steps": "… in steps",
    "long_ttft_ms": "long prompt's time to first token, ms",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--long", type=int, default=2048, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument(
        "--chunk", type=int, action="append", help="max_num_batched_tokens; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> dict[str, Any]:
    chunks = options.chunk or [128, 512]
    engines = {f"{chunk} tokens": _engine(options, chunk) for chunk in chunks}
    for engine in engines.values():
        measure(engine, options, -1)  # warms up
    rounds = alternate(
        list(engines), options.rounds, lambda case, number: measure(engines[case], options, number)
    )
    cases = {case: medians(done) for case, done in rounds.items()}
    title = (
        f"{options.streams} streams, a prompt of {options.long} tokens, then one of "
        f"{options.short}; steps of at most"
    )
    columns = {name: (words, "{:.1f}") for name, words in SHOWN.items()}
    show(Console(), title, cases, columns, turned=True)
    return {"results": {"interference": cases}, "rounds": {"interference": rounds}}


def _engine(options: argparse.Namespace, chunk: int) -> Engine:
    blocks = (options.long + options.short + 64 + options.streams * 256) // 16 + options.streams + 8
    config = EngineConfig(
        model=options.model,
        dtype="float32",
        num_blocks=blocks,
        max_num_batched_tokens=chunk,
        prefix_cache=False,
    )
    return Engine.load(config)


def measure(engine: Engine, options: argparse.Namespace, seed: int) -> dict[str, float]:
    forever = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
    streams = set(
        engine.add_requests([_prompt(16, 7 * seed + n) for n in range(options.streams)], forever)
    )
    before = _watch(engine, streams, 12)
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    started = time.perf_counter()
    (long,) = engine.add_requests([_prompt(options.long, seed)], once)
    short, arrived = "", 0.0
    during: list[float] = []
    first: dict[str, tuple[float, int]] = {}
    last = started
    while long not in first or short not in first:
        events = engine.step()
        now = time.perf_counter()
        during.append(now - last)
        last = now
        for event in events:
            if event.token_ids:
                first.setdefault(event.request_id, (now, len(during)))
        if not short:
            arrived = last = time.perf_counter()
            (short,) = engine.add_requests([_prompt(options.short, seed + 1)], once)
    for stream in streams:
        engine.cancel(stream)
    while engine.has_work:
        engine.step()
    return {
        "tpot_before_ms": 1e3 * statistics.median(before[2:]),
        "tpot_during_ms": 1e3 * statistics.median(during),
        "silence_ms": 1e3 * max(during),
        "short_ttft_ms": 1e3 * (first[short][0] - arrived),
        "short_ttft_steps": float(first[short][1] - 1),
        "long_ttft_ms": 1e3 * (first[long][0] - started),
    }


def _watch(engine: Engine, streams: set[str], steps: int) -> list[float]:
    """Run steps and return the seconds of each; only the streams may get tokens."""
    taken, last = [], time.perf_counter()
    for _ in range(steps):
        given = {event.request_id for event in engine.step() if event.token_ids}
        now = time.perf_counter()
        taken.append(now - last)
        last = now
        if not given <= streams:
            raise RuntimeError("a token of nobody's")
    return taken


def _prompt(count: int, seed: int) -> tuple[int, ...]:
    return tuple(1 + (seed * 7919 + 31 * index) % 250 for index in range(count))
