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
from dataclasses import asdict, dataclass
from typing import Self

from ops.demonstration.stack import DemoStack
from tokenmill import Client
from tokenmill.bulk import open_store
from tokenmill_schemas.result import JobResult


@dataclass(frozen=True, slots=True)
class Sample:
    first_ms: float
    queue_ms: float
    engine_ms: float
    wire_ms: float
    token_ms: float  # time per token after the first
    total_ms: float


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
    report: dict[str, object] = {
        "interactive alone": _figures(alone),
        "interactive beside bulk": _figures(beside),
        "bulk tok/s beside interactive": round(during, 1),
        "bulk tok/s alone": round(after, 1) if is_full_rest else None,
        "bulk ended before the interactive jobs did": not is_bulk_left,
    }
    print(json.dumps(report, indent=2))
    return report


class _BulkFile:
    """Runs `tokenmill bulk run` in a process of its own, as a user would; kills it at the end."""

    def __init__(self, stack: DemoStack, arguments: argparse.Namespace) -> None:
        source = stack.directory / "in.jsonl"
        with source.open("w") as file:
            for number in range(arguments.lines):
                body = {
                    "model": arguments.model,
                    "prompt": f"Number {number} is",
                    "max_tokens": arguments.bulk_tokens,
                }
                line = {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": body,
                }
                file.write(json.dumps(line) + "\n")
        where = [
            "--redis-url",
            stack.redis_url,
            "--queue",
            stack.queue,
            "--database-url",
            stack.database_url,
        ]
        output = ["-o", str(stack.directory / "out.jsonl")]
        command = [
            sys.executable,
            "-m",
            "tokenmill.cli",
            "bulk",
            "run",
            str(source),
            *output,
            *where,
        ]
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
) -> list[Sample]:
    samples: list[Sample] = []
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
            told = [
                time.monotonic()
                for chunk in client.stream(job, timeout=300)
                for _ in chunk.token_ids
            ]
            ended = time.monotonic()
            samples.append(_sample(began, told, ended, client.result(job, timeout=60)))
            print(json.dumps(asdict(samples[-1])), file=sys.stderr)
            time.sleep(arguments.pause)
    return samples


def _sample(began: float, told: list[float], ended: float, result: JobResult) -> Sample:
    first_ms, used = (told[0] - began) * 1000, result.usage
    engine_ms = float((used.ttft_ms or 0) - used.queue_ms)
    return Sample(
        first_ms=first_ms,
        queue_ms=float(used.queue_ms),
        engine_ms=engine_ms,
        wire_ms=first_ms - used.queue_ms - engine_ms,
        token_ms=(told[-1] - told[0]) * 1000 / max(1, len(told) - 1),
        total_ms=(ended - began) * 1000,
    )


def _figures(samples: list[Sample]) -> dict[str, float]:
    figures: dict[str, float] = {"jobs": len(samples)}
    for name in Sample.__slots__:
        values = sorted(getattr(sample, name) for sample in samples)
        figures[f"{name} p50"] = round(values[len(values) // 2], 1)
        figures[f"{name} p99"] = round(values[min(len(values) - 1, int(len(values) * 0.99))], 1)
    return figures
