"""`ops/bench interference`: how a long prompt delays running streams and a short prompt after it.

Some streams decode; a long prompt arrives, and in the next step a short one. Measured are the time
per output token of the streams before and during the long prefill, their longest silence, and the
short prompt's time to first token, in milliseconds and in steps. The chunk size bounds a step, so
these figures follow `--chunk`.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ops.benchmarks.measure.figures import alternate, medians
from ops.benchmarks.measure.tables import show
from tokenmill_worker.engine import Engine, EngineConfig, SamplingParams

STREAMS, LONG, SHORT = 8, 2048, 16  # streams, and tokens of both prompts
COLUMNS = {
    "tpot_before_ms": ("ms a token\nbefore", "{:.1f}"),
    "tpot_during_ms": ("\nmeanwhile", "{:.1f}"),
    "silence_ms": ("longest\nsilence", "{:.1f}"),
    "short_ttft_ms": ("short one's\nfirst, ms", "{:.1f}"),
    "short_ttft_steps": ("\nin steps", "{:.1f}"),
    "long_ttft_ms": ("long one's\nfirst, ms", "{:.1f}"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--chunk", type=int, action="append", help="max_num_batched_tokens; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> dict[str, Any]:
    chunks = options.chunk or [128, 512]
    engines = {f"{chunk} tokens": _engine(options, chunk) for chunk in chunks}
    for engine in engines.values():
        measure(engine, -1)  # warms up
    rounds = alternate(
        list(engines), options.rounds, lambda case, number: measure(engines[case], number)
    )
    cases = {case: medians(done) for case, done in rounds.items()}
    title = (
        f"{STREAMS} streams, a prompt of {LONG} tokens, then one of {SHORT}, by the size of a step"
    )
    show(Console(), title, cases, COLUMNS)
    return {"results": {"interference": cases}, "rounds": {"interference": rounds}}


def _engine(options: argparse.Namespace, chunk: int) -> Engine:
    config = EngineConfig(
        model=options.model,
        dtype="float32",
        num_blocks=(LONG + SHORT + 64 + STREAMS * 256) // 16 + STREAMS + 8,
        max_num_batched_tokens=chunk,
        prefix_cache=False,
    )
    return Engine.load(config)


def measure(
    engine: Engine, seed: int, num_streams: int = STREAMS, num_long: int = LONG
) -> dict[str, float]:
    """Measure once; the prompts' tokens follow from the seed."""
    forever = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompts = [_prompt(16, 7 * seed + number) for number in range(num_streams)]
    streams = engine.add_requests(prompts, forever)
    steps = _steps(engine)
    before = [next(steps)[0] for _ in range(12)]
    started = arrived = time.perf_counter()
    (long,) = engine.add_requests([_prompt(num_long, seed)], once)
    short = ""
    during: list[float] = []
    first: dict[str, tuple[float, int]] = {}
    while long not in first or short not in first:
        seconds, given = next(steps)
        during.append(seconds)
        for request in given:
            first.setdefault(request, (time.perf_counter(), len(during)))
        if not short:
            arrived = time.perf_counter()
            (short,) = engine.add_requests([_prompt(SHORT, seed + 1)], once)
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


def _steps(engine: Engine) -> Iterator[tuple[float, set[str]]]:
    """Run steps; yield the seconds since the last one's end, and the requests with a token."""
    last = time.perf_counter()
    while True:
        given = {event.request_id for event in engine.step() if event.token_ids}
        now = time.perf_counter()
        yield now - last, given
        last = now


def _prompt(count: int, seed: int) -> tuple[int, ...]:
    return tuple(1 + (seed * 7919 + 31 * index) % 250 for index in range(count))
