"""`ops/demo bulk`: runs a file of requests through the whole service with the user's own command.

It uses the same private servers and worker as the other demonstration. It shows `tokenmill bulk
run` itself, killed half-way and started again, then the first answers, the errors, and the rows in
SQL.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ops.demonstration.stack import DemoError, DemoStack

_THINGS = (
    "the sea", "a train", "bread", "the moon", "a library", "rain", "a bicycle", "tea", "a clock",
    "snow", "a garden",
    "copper", "a bridge", "honey", "the desert", "a violin", "salt", "a lighthouse", "paper",
    "a river",
)  # fmt: skip
_ASKED = (
    "Say one sentence about {}.",
    "Name a colour that goes with {}.",
    "Is {} old or new? Answer in one word.",
    "Give a title for a story about {}.",
    "What would a child ask about {}?",
)
_MAX_TOKENS = 8
_SHOWN = 4


def requests(count: int, model: str) -> Iterator[dict[str, object]]:
    """Generate chats and completions; one in a hundred asks for what no text model can do."""
    kinds = itertools.cycle(itertools.product(_ASKED, _THINGS))
    for number, (asked, thing) in zip(range(count), kinds, strict=False):
        text = asked.format(thing)
        body: dict[str, object] = {"model": model, "max_tokens": _MAX_TOKENS, "temperature": 0}
        if number % 5 == 4:
            url = "/v1/completions"
            content: dict[str, object] = {"prompt": f"{thing.capitalize()} is"}
        else:
            url = "/v1/chat/completions"
            content = {"messages": [{"role": "user", "content": text}]}
        if number % 100 == 50:
            content |= {"tools": [{"type": "function", "function": {"name": "look"}}]}
        yield {
            "custom_id": f"demo-{number}",
            "method": "POST",
            "url": url,
            "body": {**body, **content},
        }


def show(stack: DemoStack, model: str, count: int, console: Console) -> None:
    """Run the demonstration; raises DemoError if a line has no answer."""
    folder = stack.directory
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(request) + "\n" for request in requests(count, model)))
    console.print(f"$ tokenmill bulk run in.jsonl -o out.jsonl      # {count} lines", style="bold")
    where = {
        "TOKENMILL_REDIS_URL": stack.redis_url,
        "TOKENMILL_DATABASE_URL": stack.database_url,
        "TOKENMILL_QUEUE": stack.queue,
    }
    command = [sys.executable, "-m", "tokenmill.cli", "bulk"]
    run = [*command, "run", source.name, "-o", output.name]
    survived = _killed_on_the_way(run, folder, os.environ | where, count // 5)
    console.show_cursor()
    console.print(
        f"\nkilled (SIGKILL) with {survived} answers in out.jsonl; the same command again:",
        style="bold",
    )
    if subprocess.run(run, cwd=folder, env=os.environ | where, check=False).returncode:
        raise DemoError("`tokenmill bulk run` did not complete the batch")
    errors = folder / "out.errors.jsonl"
    answers, failures = _lines(output), _lines(errors)
    console.print(_table("answers, as the OpenAI Batch API writes them", answers[:_SHOWN]))
    console.print(_table("errors", failures[:_SHOWN]))
    console.print("$ tokenmill bulk list", style="bold")
    subprocess.run([*command, "list"], cwd=folder, env=os.environ | where, check=True)
    names = [line["custom_id"] for line in answers + failures]
    if sorted(names) != sorted(f"demo-{number}" for number in range(count)):
        raise DemoError(f"{len(names)} lines were answered, of {count}")
    console.print(
        f"{count} lines in, answers: {len(answers)}, errors: {len(failures)}; each line once"
    )


def _killed_on_the_way(
    command: list[str], folder: Path, environment: dict[str, str], after: int
) -> int:
    """Kill the command when its output has `after` answers, and return how many it has then.

    A command that finishes before that is not killed.
    """
    output = folder / "out.jsonl"
    with subprocess.Popen(command, cwd=folder, env=environment) as child:
        try:
            while child.poll() is None and len(_raw_lines(output)) < after:
                time.sleep(0.1)
        finally:
            child.kill()
    return len(_raw_lines(output))


def _raw_lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def _lines(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    found = (json.loads(line) for line in path.read_text().splitlines())
    return [{"custom_id": line["custom_id"], "text": _text(line)} for line in found]


def _text(line: dict[str, Any]) -> str:
    if line["error"] is not None:
        return str(line["error"]["message"])
    body: dict[str, Any] = line["response"]["body"]
    if "error" in body:
        return str(body["error"]["message"])
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _table(title: str, lines: list[dict[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", expand=True)
    table.add_column("custom_id", no_wrap=True)
    table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    for line in lines:
        table.add_row(line["custom_id"], " ".join(line["text"].split()))
    return table
