"""Runs the demonstration: starts servers and a worker, submits jobs, prints tables, stops.

It uses only what a user of the service can use: `AsyncClient` for the jobs, `SqlResults` for the
database.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ops.demonstration import bulk
from ops.demonstration.questions import QUESTIONS, Question
from ops.demonstration.stack import DemoError, DemoStack, Notice
from ops.demonstration.view import View, choose_view
from tokenmill import AsyncClient
from tokenmill.sql import SqlResults
from tokenmill_schemas.result import JobResult

PLAIN_NOTICE_INTERVAL_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="ops/demo", description="The whole service on this machine, once."
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=("chats", "bulk"),
        default="chats",
        help="bulk: a file of requests",
    )
    parser.add_argument("--lines", type=int, default=500, help="of the file")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--queue", default="demo")
    parser.add_argument("--max-tokens", type=int, help="at most so many tokens per answer")
    options = parser.parse_args()
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()
    try:
        with DemoStack(options.model, options.queue) as stack:
            with notices(console) as notice:
                stack.start(notice)
            if options.what == "bulk":
                bulk.show(stack, options.model, options.lines, console)
            else:
                asyncio.run(show(stack, QUESTIONS, options.max_tokens, console))
            with notices(console) as notice:
                notice("stopping the worker and the servers")
                stack.stop()
    except DemoError as error:
        console.print(f"ops/demo: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("ops/demo: interrupted; everything it started is stopped", markup=False)
        return 130
    console.print(
        f"done in {time.monotonic() - started:.0f} s; nothing is left running", highlight=False
    )
    return 0


async def show(
    stack: DemoStack, questions: Sequence[Question], max_tokens: int | None, console: Console
) -> None:
    async with AsyncClient(
        stack.redis_url, queue=stack.queue, database=stack.database_url
    ) as client:
        jobs = [
            await client.submit(
                messages=[{"role": "user", "content": question.text}],
                max_tokens=min(question.max_tokens, max_tokens or question.max_tokens),
                temperature=question.temperature,
                seed=question.seed,
                tenant=question.tenant,
                priority=question.priority,
            )
            for question in questions
        ]
        with choose_view(questions, console) as view:
            await asyncio.gather(
                *(_follow(client, job, index, view) for index, job in enumerate(jobs))
            )
        results = [await client.result(job, timeout=30) for job in jobs]
    console.print(results_table(questions, results))
    console.print(usage_table(stack.database_url))


async def _follow(client: AsyncClient, job: str, index: int, view: View) -> None:
    state = "unknown"
    async for chunk in client.stream(job):
        if chunk.text or chunk.token_ids:
            view.token(index, chunk.text, len(chunk.token_ids))
        if chunk.status is not None:
            state = chunk.status.value
    view.ended(index, state)


def results_table(questions: Sequence[Question], results: Sequence[JobResult]) -> Table:
    table = Table(
        title="results (Redis, for an hour; SQL, for good)", title_justify="left", expand=True
    )
    table.add_column("question", ratio=1, no_wrap=True, overflow="ellipsis")
    for name, width in (("state", 9), ("end", 6)):
        table.add_column(name, min_width=width, no_wrap=True)
    for name in ("tokens", "first ms", "total ms"):
        table.add_column(name, justify="right", min_width=len(name), no_wrap=True)
    for question, result in zip(questions, results, strict=True):
        usage = result.usage
        table.add_row(
            question.text,
            result.status.value,
            result.finish_reason.value if result.finish_reason else "",
            str(usage.completion_tokens),
            str(usage.ttft_ms),
            str(usage.total_ms),
        )
    return table


def usage_table(database_url: str) -> Table:
    table = Table(title="usage, read from SQL", title_justify="left")
    for name in (
        "tenant",
        "jobs",
        "prompt tokens",
        "cached tokens",
        "completion tokens",
        "mean first token ms",
    ):
        table.add_column(name, justify="left" if name == "tenant" else "right")
    results = SqlResults(database_url)
    for row in results.usage(by=("tenant",)):
        numbers = (
            row.jobs,
            row.prompt_tokens,
            row.cached_tokens,
            row.completion_tokens,
            round(row.mean_ttft_ms),
        )
        table.add_row(row.group[0], *(str(number) for number in numbers))
    results.close()
    return table


@contextmanager
def notices(console: Console) -> Iterator[Notice]:
    """Show what the program waits for: a spinner on a terminal, otherwise a line now and then."""
    if console.is_terminal:
        with console.status("") as status:

            def update(words: str) -> None:  # one line, also if the terminal is narrow
                text = Text(words)
                text.truncate(console.width - 3, overflow="ellipsis")  # less the spinner
                status.update(text)

            yield update
        return
    last_at, last_topic = 0.0, ""

    def notice(text: str) -> None:
        nonlocal last_at, last_topic
        topic = text.split(" (")[0]
        if topic != last_topic or time.monotonic() - last_at >= PLAIN_NOTICE_INTERVAL_S:
            last_at, last_topic = time.monotonic(), topic
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    yield notice


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
