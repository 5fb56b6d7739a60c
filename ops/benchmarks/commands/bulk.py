"""`ops/bench bulk`: how a bulk file slows down interactive jobs, and how they slow down the file.

One worker and private servers run three phases: interactive jobs alone, one after the other; the
same jobs while `tokenmill bulk run` works on a file in a process of its own; then the file alone.
Interactive jobs are streamed. Measured is the time to the first token, at the client.

With `--templates N`: a file alone, whose lines begin with N templates in random order; with
`--beside`, beside jobs of two other tenants with deadlines.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from contextlib import ExitStack, closing

from rich.console import Console

from ops.benchmarks.measure import templates
from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.measure.tables import show
from ops.demonstration.stack import DemoStack
from tokenmill import Client
from tokenmill.bulk import open_store
from tokenmill_worker.local.child_process import GuardedProcess

COLUMNS = {
    "jobs": ("jobs", "{:.0f}"),
    "first_ms_p50": ("first token\nms p50", "{:.1f}"),
    "first_ms_p99": ("\np99", "{:.1f}"),
    "tokens_s": ("the file\ntokens/s", "{:.1f}"),
    "completed": ("lines\ndone", "{:.0f}"),
    "computed": ("computed\n× unique", "{:.2f}"),
    "lines_s": ("lines/s", "{:.2f}"),
    "ratio": ("× file's\norder", "{:.2f}"),
}
BESIDE = {
    "interactive_kept": ("people's\nin time", "{:.1%}"),
    "interactive_p50": ("\np50 s", "{:.2f}"), "interactive_p99": ("\np99 s", "{:.2f}"),
    "bulk_kept": ("other bulk\nin time", "{:.1%}"),
    "bulk_p50": ("\np50 s", "{:.2f}"), "bulk_p99": ("\np99 s", "{:.2f}"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="synthetic")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--bulk-tokens", type=int, default=32, help="of each line's answer")
    parser.add_argument("--jobs", type=int, default=60, help="interactive ones, in each phase")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two jobs")
    parser.add_argument("--tokens", type=int, default=16, help="of each interactive answer")
    parser.add_argument("--templates", type=int, default=0, help="measure a file of N templates")
    parser.add_argument("--beside", action="store_true", help="others' jobs beside --templates")
    parser.add_argument("--rest", type=float, default=15.0, help="seconds of the file alone")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    if arguments.templates:
        cases = templates.measure(arguments)
        title = f"{arguments.lines:,} lines of {arguments.templates} templates, shuffled"
        show(Console(), title, cases, COLUMNS)
        if arguments.beside:
            show(Console(), "jobs of other tenants beside it", cases, BESIDE)
        return {"results": {"templates": cases}}
    with DemoStack(arguments.model, "bench") as stack, ExitStack() as undo:
        stack.start(lambda _: None)
        client = Client(stack.redis_url, queue=stack.queue, database=stack.database_url)
        undo.callback(client.close)
        _interactive(client, arguments, count=5)  # warm up
        cases = {"jobs alone": _interactive(client, arguments, arguments.jobs)}
        bulk = undo.enter_context(closing(_BulkFile(stack, client, arguments)))
        before, since = bulk.first_tokens(), time.monotonic()
        beside = cases["both"] = _interactive(client, arguments, arguments.jobs)
        beside["tokens_s"] = (bulk.tokens() - before) / (time.monotonic() - since)
        if not bulk.is_running:
            print("the file ended before the interactive jobs did: give it more lines")
        before, since = bulk.tokens(), time.monotonic()
        time.sleep(arguments.rest)
        rest = (bulk.tokens() - before) / (time.monotonic() - since)
        if bulk.is_running:
            cases["the file alone"] = {"tokens_s": rest}
    title = f"interactive jobs beside a file of {arguments.lines:,} lines"
    show(Console(), title, cases, COLUMNS)
    return {"results": {"bulk": cases}}


class _BulkFile:
    """`tokenmill bulk run` in a process of its own, as a user would start it."""

    def __init__(self, stack: DemoStack, client: Client, arguments: argparse.Namespace) -> None:
        self._store = open_store(client)
        source, limits = stack.directory / "in.jsonl", {"max_tokens": arguments.bulk_tokens}
        with source.open("w") as file:
            for number in range(arguments.lines):
                body = {"model": arguments.model, "prompt": f"Number {number} is", **limits}
                line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
                file.write(json.dumps({**line, "body": body}) + "\n")
        command = [sys.executable, "-m", "tokenmill.cli", "bulk", "run", str(source)]
        command += ["-o", str(stack.directory / "out.jsonl"), "--redis-url", stack.redis_url]
        command += ["--queue", stack.queue, "--database-url", stack.database_url]
        self._process = GuardedProcess(command)

    @property
    def is_running(self) -> bool:
        return self._process.is_alive

    def tokens(self) -> int:
        """Return the output tokens of the file so far; the count lags by up to a second."""
        batches = self._store.newest(1)
        return batches[0].totals.output_tokens if batches else 0

    def first_tokens(self) -> int:
        """Wait for the first answers, and return their tokens."""
        until = time.monotonic() + 120
        while not (tokens := self.tokens()):
            if not self.is_running or time.monotonic() > until:
                raise RuntimeError("the bulk file has no answers")
            time.sleep(0.2)
        return tokens

    def close(self) -> None:
        self._process.end(signal.SIGKILL)
        self._store.close()


def _interactive(client: Client, arguments: argparse.Namespace, count: int) -> dict[str, float]:
    """Run jobs one after the other, and return their figures."""
    first_ms = []
    fields = {"max_tokens": arguments.tokens, "ignore_eos": True, "priority": "interactive"}
    for number in range(count):
        began = time.monotonic()
        job = client.submit(prompt=f"Question {number}:", **fields)
        next(chunk for chunk in client.stream(job, timeout=300) if chunk.token_ids)
        first_ms.append((time.monotonic() - began) * 1000)
        client.result(job, timeout=300)
        time.sleep(arguments.pause)
    p50, p99 = (percentile(first_ms, share) for share in (0.5, 0.99))
    return {"jobs": float(count), "first_ms_p50": p50, "first_ms_p99": p99}
