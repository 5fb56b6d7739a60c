"""`ops/bench bulk`: how a bulk file slows down interactive jobs, and how they slow down the file.

One worker and private servers run three phases: interactive jobs alone, one after the other; the
same jobs while `tokenmill bulk run` works on a file in a process of its own; then the file alone.
Interactive jobs are streamed and measured at the client. The time to the first token is split with
the times in their results: `queue_ms` until a worker claimed the job, `engine_ms` from there until
its first token, and `wire_ms`, the rest: submission and delivery.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Self

from rich.console import Console

from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.measure.tables import show
from ops.demonstration.stack import DemoStack
from tokenmill import Client
from tokenmill.bulk import open_store
from tokenmill_schemas.result import JobResult

TIMES = [
    f"{name}_{rank}"
    for name in ("first_ms", "queue_ms", "engine_ms", "wire_ms", "token_ms", "total_ms")
    for rank in ("p50", "p99")
]  # token_ms: per token after the first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="synthetic")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--bulk-tokens", type=int, default=32, help="of each line's answer")
    parser.add_argument("--jobs", type=int, default=60, help="interactive ones, in each phase")
    parser.add_argument(
        "--pause", type=float, default=0.1, help="seconds between the end of one and the next"
    )
    parser.add_argument("--tokens", type=int, default=16, help="of each interactive answer")
    parser.add_argument(
        "--at-most", type=float, default=90.0, help="seconds of interactive jobs in each phase"
    )
    parser.add_argument("--rest", type=float, default=15.0, help="seconds of the file alone")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    with DemoStack(arguments.model, "bench") as stack:
        stack.start(lambda _: None)
        _interactive(stack, arguments, count=5)  # warm up
        alone = _interactive(stack, arguments)
        with _BulkFile(stack, arguments) as bulk:
            bulk.wait_for_answers()
            before, since = bulk.tokens, time.monotonic()
            beside = _interactive(stack, arguments)
            during = (bulk.tokens - before) / (time.monotonic() - since)
            before, since, is_bulk_left = bulk.tokens, time.monotonic(), bulk.is_running
            time.sleep(arguments.rest)
            after = (bulk.tokens - before) / (time.monotonic() - since)
            is_full_rest = bulk.is_running
    cases = {"alone": _figures(alone), "beside the file": _figures(beside)}
    columns = {
        "jobs": ("jobs", "{:.0f}"),
        **{name: (name.replace("_", " "), "{:.1f}") for name in TIMES},
    }
    show(Console(), "interactive jobs, p50 / p99", cases, columns, turned=True)
    rates = {
        "tokens_s beside interactive jobs": round(during, 1),
        "tokens_s alone": round(after, 1) if is_full_rest else None,
    }
    print(f"the file: {rates}; ended before the interactive jobs did: {not is_bulk_left}")
    return {"results": {"interactive": cases, "bulk": {"file": rates}}}


class _BulkFile:
    """Runs `tokenmill bulk run` in a process of its own, as a user would; kills it at the end."""

    def __init__(self, stack: DemoStack, arguments: argparse.Namespace) -> None:
        source = stack.directory / "in.jsonl"
        with source.open("w") as file:
            for number in range(arguments.lines):
                prompt = f"Number {number} is"
                limits = {"model": arguments.model, "max_tokens": arguments.bulk_tokens}
                line = {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"prompt": prompt, **limits},
                }
                file.write(json.dumps(line) + "\n")
        command = [sys.executable, "-m", "tokenmill.cli", "bulk", "run", str(source)]
        command += ["-o", str(stack.directory / "out.jsonl"), "--redis-url", stack.redis_url]
        command += ["--queue", stack.queue, "--database-url", stack.database_url]
        self._process = subprocess.Popen(
            command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        self._client = Client(stack.redis_url, queue=stack.queue, database=stack.database_url)
        self._store = open_store(self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._store.close()
        self._client.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def tokens(self) -> int:
        """Number of output tokens of the file so far; the count lags by up to a second."""
        batches = self._store.newest(1)
        return batches[0].totals.output_tokens if batches else 0

    def wait_for_answers(self) -> None:
        until = time.monotonic() + 120
        while not self.tokens:
            if not self.is_running or time.monotonic() > until:
                raise RuntimeError("the bulk file has no answers")
            time.sleep(0.2)


def _interactive(
    stack: DemoStack, arguments: argparse.Namespace, count: int | None = None
) -> list[dict[str, float]]:
    samples: list[dict[str, float]] = []
    until = time.monotonic() + arguments.at_most
    with Client(stack.redis_url, queue=stack.queue) as client:
        for number in range(count or arguments.jobs):
            if samples and time.monotonic() > until:
                break
            began = time.monotonic()
            job = client.submit(
                prompt=f"Question {number}:",
                max_tokens=arguments.tokens,
                ignore_eos=True,
                priority="interactive",
            )
            arrived = [
                time.monotonic()
                for chunk in client.stream(job, timeout=300)
                for _ in chunk.token_ids
            ]
            ended = time.monotonic()
            samples.append(_times(began, arrived, ended, client.result(job, timeout=60)))
            print(json.dumps(samples[-1]), file=sys.stderr)
            time.sleep(arguments.pause)
    return samples


def _times(began: float, arrived: list[float], ended: float, result: JobResult) -> dict[str, float]:
    first_ms, used = (arrived[0] - began) * 1000, result.usage
    engine_ms = float((used.ttft_ms or 0) - used.queue_ms)
    return {
        "first_ms": first_ms,
        "queue_ms": float(used.queue_ms),
        "engine_ms": engine_ms,
        "wire_ms": first_ms - used.queue_ms - engine_ms,
        "token_ms": (arrived[-1] - arrived[0]) * 1000 / max(1, len(arrived) - 1),
        "total_ms": (ended - began) * 1000,
    }


def _figures(samples: list[dict[str, float]]) -> dict[str, float]:
    found = {"jobs": float(len(samples))}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        found |= {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}
    return found
