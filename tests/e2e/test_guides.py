"""Python code in the guides and the README runs as it stands, except for the addresses.

The commands that these pages name exist with the options that are named.
"""

import asyncio
import contextlib
import importlib
import io
import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from ops.benchmarks import __main__ as bench
from ops.benchmarks.commands.engine import PEERS
from tests.support.pages import GUIDES, ROOT, at, blocks, python_of
from tests.support.two_choices import TEXTS, read_two_choices
from tests.support.worker import client_of, database_url, running_worker
from tokenmill import webhooks
from tokenmill.cli import app
from tokenmill.testing import InMemoryQueue
from tokenmill_schemas.keys import Keys

PAGES = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]


@pytest.mark.redis
@pytest.mark.parametrize("name", ["bulk.md", "client.md", "quickstart.md", "streaming.md"])
async def test_python_in_the_guides_runs(
    name: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of a page one after the other, as a reader would paste them. The one with a tool
    needs a model whose template has tools: `test_guides_with_model.py`.
    """
    monkeypatch.chdir(tmp_path)  # a block may write files
    code = "\n".join(block for block in python_of(GUIDES / name) if "tools=" not in block)
    assert code
    database = database_url(tmp_path)
    printed = io.StringIO()
    names: dict[str, Any] = {"__name__": "pasted"}
    async with running_worker(redis_url, database):
        with contextlib.redirect_stdout(printed):
            await asyncio.to_thread(
                exec, compile(at(code, redis_url, database), name, "exec"), names
            )
    assert ("completed {" if name == "bulk.md" else "completion_tokens=") in printed.getvalue()


@pytest.mark.redis
@pytest.mark.parametrize("max_tokens", [1, 400])
async def test_the_reader_of_the_protocol_page_reads_the_text_of_the_result(
    max_tokens: int,
    redis_url: str,
    valkey: Any,
    allowed_keys: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed_keys.append("tm:{*")
    monkeypatch.chdir(ROOT)  # where the scripts are
    code = "\n".join(python_of(GUIDES / "protocol.md"))
    database = database_url(tmp_path)
    names: dict[str, Any] = {}

    def read(job: str, **fields: Any) -> list[str]:
        texts = [""] * fields.get("n", 1)

        def emit(choice: int, text: str) -> None:
            texts[choice] += text

        names["Reader"](job, emit).read()
        return texts

    async with running_worker(redis_url, database, model="synthetic?mean_tokens=200"):
        with contextlib.redirect_stdout(io.StringIO()):
            await asyncio.to_thread(exec, at(code, redis_url, database), names)
        async with client_of(redis_url, database) as client:
            for n in (1, 3):
                job = await asyncio.to_thread(names["submit"], "Go", max_tokens, f"key-{n}", n)
                live = await asyncio.to_thread(read, job, n=n)
                late = await asyncio.to_thread(read, job, n=n)
                result = await client.result(job, timeout=30)
                assert live == late == [choice.text for choice in result.choices]
                again = await asyncio.to_thread(names["submit"], "Go", max_tokens, f"key-{n}", n)
                assert again == job
        with pytest.raises(LookupError):
            await asyncio.to_thread(read, "no-such-job")

    async def read_two(job: str) -> list[str]:
        return await asyncio.to_thread(read, job, n=2)

    with valkey.client() as server:
        keys = Keys(names["QUEUE"])
        for from_result in (False, True):
            job = f"by-hand-{from_result}"
            texts = await read_two_choices(server, keys, job, read_two, from_result=from_result)
            assert texts == TEXTS


def test_an_adapter_is_named_as_in_the_guide() -> None:
    (code,) = python_of(GUIDES / "models.md")
    with InMemoryQueue(default="Rain falls.") as queue:
        client = queue.client()
        submit = lambda **fields: client.result(client.submit(**fields), timeout=10)  # noqa: E731
        exec(code, {"client": SimpleNamespace(submit=submit)})
        by_option, by_model = queue.requests
    assert by_option.params.lora == by_model.model == "poet"


def test_a_webhook_is_verified_as_in_the_guide() -> None:
    code = python_of(GUIDES / "celery.md")[0]
    job: dict[str, Any] = {
        "job_id": "j", "status": "failed", "queue": "q", "model": "m", "tenant": "", "choices": [],
        "usage": None, "error": None, "attempt": 1, "created_ms": 0, "started_ms": 0,
        "finished_ms": 0, "metadata": {},
    }  # fmt: skip
    event = {"type": "job.failed", "timestamp": "2026-01-01T00:00:00Z", "data": job}
    body, secret, now = json.dumps(event).encode(), webhooks.new_secret(), int(time.time())
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(now),
        "webhook-signature": webhooks.sign("msg_1", now, body, secret),
    }
    stored: list[tuple[str, object]] = []
    names = {
        "body": body,
        "request": SimpleNamespace(headers=headers),
        "SECRET": secret,
        "first_time": lambda _: True,
        "store": lambda *values: stored.append(values),
    }
    exec(code, names)
    assert stored == [("j", ())]


def command_lines() -> Iterator[tuple[str, str]]:
    """Return (page, line) of every command that begins with `tokenmill`."""
    for page in PAGES:
        for language, block in blocks(page):
            for line in block.splitlines() if language in ("", "sh") else ():
                found = re.search(r"(?:^|\$\()\s*(tokenmill [^#)]*)", line)
                if found and "…" not in line:
                    yield page.name, found[1].strip()


def test_the_commands_that_pages_name_exist() -> None:
    """Each is parsed as the shell would hand it over, options and arguments; none is run."""
    lines = list(command_lines())
    assert len(lines) >= 10
    wrong = [
        f"{page}: {line}: {problem}"
        for page, line in lines
        if (problem := parse_problem(line)) is not None
    ]
    assert wrong == []


def parse_problem(line: str) -> str | None:
    words = shlex.split(line, comments=True)[1:]
    words = words[
        : next(
            (place for place, word in enumerate(words) if word in ("|", ">", "<", "&")), len(words)
        )
    ]
    command: Any = typer.main.get_command(app)
    try:
        context = command.make_context("tokenmill", [], resilient_parsing=True)
        while hasattr(command, "get_command"):
            command = command.get_command(context, words.pop(0))
        command.make_context("tokenmill", words)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_a_wrong_command_is_found_by_the_check_of_commands() -> None:
    assert parse_problem("tokenmill submit --max-tokens 5 Hello") is None
    assert parse_problem("tokenmill submit --no-such-option") is not None
    assert parse_problem("tokenmill conquer") is not None


def bench_lines() -> set[str]:
    """Return the arguments of every `ops/bench …` that a page names, in prose or in a block."""
    pages = [*PAGES, *(ROOT / "ops" / name for name in ("runbook.md", "benchmarks/results.md"))]
    found = set()
    for page in pages:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        found |= set(re.findall(r"^ops/bench ([^#\n]+)", text, re.MULTILINE))
        found |= set(re.findall(r"`ops/bench ([^`]+)`", text))
    return {line.strip() for line in found if "…" not in line and line != "--help"}


def test_every_benchmark_and_peer_is_named_beside_a_figure_of_a_page() -> None:
    """A command or peer that no page uses is to be removed."""
    words = [shlex.split(line) for line in bench_lines()]
    assert {command for command, *_ in words} == set(bench.COMMANDS)
    results = (ROOT / "ops" / "benchmarks" / "results.md").read_text(encoding="utf-8")
    for peer in PEERS:
        assert re.search(rf"--peer\s{peer}\b", results), peer


@pytest.mark.slow
def test_benchmark_commands_on_pages_have_options_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # `--json` writes a file
    ran: list[object] = []

    def run(options: object) -> dict[str, object]:
        ran.append(options)
        return {"ok": True}

    def load(name: str) -> SimpleNamespace:
        command = importlib.import_module(f"ops.benchmarks.commands.{name}")
        return SimpleNamespace(add_arguments=command.add_arguments, run=run)

    monkeypatch.setattr(bench, "_load", load)
    lines = bench_lines()
    assert len(lines) >= 8
    for line in lines:
        assert bench.main(shlex.split(line)) == 0, line
    assert len(ran) == len(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_and_headings_of_a_page_exist(page: Path) -> None:
    """Files that are linked are there, and so are the headings that a link points to."""
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert missing == []


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
