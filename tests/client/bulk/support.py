"""Makes lines and files of requests, and reads answers back."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tokenmill import Client
from tokenmill.bulk import (
    BatchOptions,
    BatchStore,
    Paths,
    RunLimits,
    open_store,
    run_batch,
)
from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_schemas.openai import CHAT_URL, COMPLETIONS_URL
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus, Usage

T = TypeVar("T")

Lines = Callable[[int], dict[str, Any]]


def chat(name: str, text: str = "Hello", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": "synthetic", "messages": messages, "max_tokens": 4, **body}
    return {"custom_id": name, "method": "POST", "url": CHAT_URL, "body": body}


def completion(name: str, prompt: Any = "Once", **body: Any) -> dict[str, Any]:
    body = {"model": "synthetic", "prompt": prompt, "max_tokens": 4, **body}
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS_URL, "body": body}


def numbered(number: int) -> dict[str, Any]:
    """Make the request of a line: a chat if `number` is odd, else a completion."""
    return (chat if number % 2 else completion)(f"line-{number}", f"number {number}", seed=number)


def write(path: Path, lines: list[dict[str, Any] | str]) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def write_many(path: Path, count: int) -> Path:
    with path.open("w") as file:
        file.writelines(json.dumps(numbered(number)) + "\n" for number in range(count))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def names(path: Path) -> list[str]:
    return [line["custom_id"] for line in read(path)]


def result(
    batch_id: str, line: int, status: JobStatus = JobStatus.SUCCEEDED, **changes: Any
) -> JobResult:
    """Build the result of a chat job that answered "Hi ☁" in two tokens."""
    choice = ChoiceResult(
        text="Hi ☁",
        token_ids=(7, 9),
        text_ends=(3, 4),
        finish_reason=FinishReason.LENGTH,
        logprobs=(
            TokenLogprob(-0.5, ((7, -0.5), (8, -2.0)), b"Hi ", (b"Hi ", b"Ho")),
            TokenLogprob(-0.25, ((9, -0.25), (3, -4.0)), "☁".encode(), ("☁".encode(), b"\xe2\x98")),
        ),
    )
    values = {
        "job_id": f"{batch_id}-{line}",
        "status": status,
        "model": "m",
        "choices": (choice,) if status is JobStatus.SUCCEEDED else (),
        "usage": Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=2, reasoning_tokens=1),
        "created_ms": 1_700_000_000_000,
        "finished_ms": 1_700_000_001_000 + line,
        "metadata": {"custom_id": f"line-{line}", "endpoint": CHAT_URL},
    }
    return JobResult(**(values | changes))


@dataclasses.dataclass(frozen=True)
class BulkSetup:
    """A user's setting: a folder, and the addresses of the service."""

    folder: Path
    redis_url: str
    database: str | None

    @property
    def paths(self) -> Paths:
        return Paths.of(self.folder / "out.jsonl")

    def do(self, act: Callable[[Client, BatchStore], T]) -> T:
        with Client(self.redis_url, queue="q", database=self.database) as client:
            store = open_store(client, self.paths.output)
            try:
                return act(client, store)
            finally:
                store.close()

    async def run(self, path: Path, *, options: BatchOptions | None = None, **limits: Any) -> Any:
        given = RunLimits(**limits)
        return await asyncio.to_thread(
            self.do,
            lambda client, store: run_batch(
                client, store, path, self.paths, options=options, limits=given
            ),
        )


async def until(find: Callable[[], T | None]) -> T:
    """Wait for the first true answer and return it."""
    for _ in range(600):
        if found := await asyncio.to_thread(find):
            return found
        await asyncio.sleep(0.1)
    raise TimeoutError


class Interrupted(Exception):
    pass


def interrupt_after(count: int) -> Callable[[Any], None]:
    def on_progress(progress: Any) -> None:
        if progress.totals.ended >= count:
            raise Interrupted

    return on_progress
