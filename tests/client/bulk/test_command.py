"""`tokenmill bulk` as a user types it: killed in the middle, asked from another place, wrongly
used.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.client.bulk.support import names, read, write_many
from tests.support.waiting import until
from tests.support.worker import QUEUE, running_worker
from tokenmill import Client
from tokenmill.cli import app

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]


class Shell:
    def __init__(self, redis_url: str, database: str) -> None:
        self.where = {
            "TOKENMILL_REDIS_URL": redis_url,
            "TOKENMILL_DATABASE_URL": database,
            "TOKENMILL_QUEUE": QUEUE,
        }

    async def start(self, *arguments: str | Path) -> asyncio.subprocess.Process:
        environment = {**os.environ, **self.where, "COLUMNS": "160"}  # noqa: TID251 - the child's
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tokenmill.cli", "bulk", *map(str, arguments), env=environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async def __call__(self, *arguments: str | Path) -> tuple[int | None, str, str]:
        process = await self.start(*arguments)
        out, error = await asyncio.wait_for(process.communicate(), 120)
        return process.returncode, out.decode(), error.decode()

    def here(self, *arguments: str | Path) -> tuple[int, str, str]:
        """Run a command in this process, without the second that the start of another takes."""
        environment = {**self.where, "COLUMNS": "160"}
        done = CliRunner().invoke(app, ["bulk", *map(str, arguments)], env=environment)
        return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def shell(redis_url: str, database: str) -> Shell:
    return Shell(redis_url, database)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_missing_input_file_makes_no_batch(shell: Shell, tmp_path: Path) -> None:
    status, said, error = shell.here("submit", tmp_path / "none.jsonl")
    assert (status, said) == (1, "")
    assert error.startswith("Error: cannot read ")
    assert shell.here("list") == (0, "", "no batches\n")


def test_a_missing_output_folder_is_refused_by_name_and_not_made(
    shell: Shell, tmp_path: Path
) -> None:
    path, folder = write_many(tmp_path / "in.jsonl", 3), tmp_path / "none"
    for paths in (
        ("-o", folder / "o.jsonl"),
        ("-o", tmp_path / "o.jsonl", "--errors", folder / "e.jsonl"),
    ):
        status, said, error = shell.here("run", path, *paths)
        assert (status, said, folder.exists()) == (1, "", False)
        assert f"there is no folder {folder}: make it first" in error


@pytest.mark.slow
async def test_a_run_killed_half_way_and_resumed_writes_each_line_once(
    shell: Shell, redis_url: str, database: str, tmp_path: Path
) -> None:
    path, out = write_many(tmp_path / "in.jsonl", 600), tmp_path / "out.jsonl"
    command = ("run", path, "-o", out, "--window", "40")
    async with running_worker(redis_url, database):
        for count in (1, 60, 130):
            process = await shell.start(*command)
            await until(lambda count=count: num_lines(out) >= count)  # type: ignore[misc]
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.communicate()
            assert num_lines(out) < 600
        status, said, _ = await shell(*command)
    assert (status, "600 of 600 answered" in said) == (0, True)
    assert sorted(names(out)) == sorted(f"line-{number}" for number in range(600))
    texts = [line["response"]["body"]["usage"]["completion_tokens"] for line in read(out)]
    _, listed, _ = await shell("list", "--json")
    (batch,) = json.loads(listed)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 600)
    assert batch["usage"]["output_tokens"] == sum(texts)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_command_prints_how_to_resume(
    shell: Shell, redis_url: str, database: str, tmp_path: Path, stop: signal.Signals
) -> None:
    path, out = write_many(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    process = await shell.start("run", path, "-o", out)
    await until(lambda: _num_queued(redis_url) == 5)
    process.send_signal(stop)
    _, error = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, "run the same command again to continue" in error.decode()) == (
        130,
        True,
    )
    assert b"Traceback" not in error
    async with running_worker(redis_url, database):
        status, said, _ = await shell("run", path, "-o", out)
    assert (status, "5 of 5 answered" in said, len(set(names(out)))) == (0, True, 5)


def _num_queued(redis_url: str) -> int:
    with Client(redis_url, queue=QUEUE) as client:
        return client.depth().num_queued


async def test_submit_status_results_and_list_show_one_batch(
    shell: Shell, redis_url: str, database: str, tmp_path: Path
) -> None:
    path, out = write_many(tmp_path / "in.jsonl", 12), tmp_path / "out.jsonl"
    status, said, error = await shell("submit", path, "--metadata", "team=blue", "--tenant", "acme")
    assert status == 0, error
    batch = said.strip()
    status, _, error = shell.here("results", batch, "-o", out)
    assert (status, "12 lines to go" in error) == (1, True)
    async with running_worker(redis_url, database):
        received = await _completed(shell, batch)
    assert received["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    assert received["metadata"] == {"team": "blue"}
    before = path.read_bytes()
    status, _, error = shell.here("results", batch, "-o", path)
    assert (status, "is the batch's input" in error, path.read_bytes()) == (1, True, before)
    status, said, _ = shell.here("results", batch, "-o", out)
    assert (status, "12 of 12 answered" in said, len(names(out))) == (0, True, 12)
    assert batch in shell.here("list")[1]
    assert "12 answered" in shell.here("status", batch)[1]


async def _completed(shell: Shell, batch: str) -> Any:
    for _ in range(60):
        received = json.loads((await asyncio.to_thread(shell.here, "status", batch, "--json"))[1])
        if received["status"] == "completed":
            return received
        await asyncio.sleep(0.5)
    raise TimeoutError


def test_a_cancelled_batch_has_the_status_cancelled(
    shell: Shell, tmp_path: Path, allowed_keys: list[str]
) -> None:
    allowed_keys.append("tm:{q}:*")  # no worker writes down what was cancelled
    batch = shell.here("submit", write_many(tmp_path / "in.jsonl", 4))[1].strip()
    assert shell.here("cancel", batch)[1] == f"{batch} cancelled\n"
    assert shell.here("cancel", batch)[1] == f"{batch} cancelled\n"
    status, said, _ = shell.here("results", batch, "-o", tmp_path / "out.jsonl")
    assert (status, "0 of 4 answered" in said) == (1, True)
    assert {line["error"]["code"] for line in read(tmp_path / "out.errors.jsonl")} == {
        "batch_cancelled"
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "missing.jsonl", "-o", "OUT"), "cannot read missing.jsonl"),
        (("run", "IN", "-o", "OUT", "--completion-window", "soon"), "completion window"),
        (("run", "IN", "-o", "OUT", "--metadata", "x"), "KEY=VALUE"),
        (("run", "IN", "-o", "FOLDER"), "directory"),
        (("run", "IN", "-o", "n" * 250 + ".jsonl"), "File name too long"),
        (("run", "n" * 256, "-o", "OUT"), "File name too long"),
        (("results", "batch_none", "-o", "n" * 245), "File name too long"),
        (("list", "--database-url", "sqlite:///" + "n" * 256), "there is no database at"),
        (("run", "IN", "-o", "."), "directory"),
        (("results", "batch_none", "-o", "/"), "directory"),
        (("run", "IN", "-o", "OUT", "--errors", "OUT"), "for the errors"),
        (("run", "IN", "-o", "OUT", "--redis-url", "redis://127.0.0.1:1/0"), "--redis-url"),
        (("status", "batch_none"), "no batch batch_none"),
        (("submit", "IN", "--continue", "batch_none"), "no batch batch_none"),
        (("cancel", "batch_none"), "no batch batch_none"),
    ],
)
def test_each_command_error_is_one_sentence_and_an_exit_status(
    shell: Shell, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    places = {
        "IN": write_many(tmp_path / "in.jsonl", 1),
        "OUT": tmp_path / "out.jsonl",
        "FOLDER": tmp_path,
    }
    words = [str(places.get(word, word)) for word in arguments]
    done = CliRunner().invoke(app, ["bulk", *words], env=shell.where)
    assert (done.exit_code, says in done.output) == (1, True), done.output
    assert isinstance(done.exception, SystemExit)


async def test_a_run_without_a_database_keeps_its_batch_beside_the_output(
    redis_url: str, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)  # the default database is relative: here there is none
    shell = Shell(redis_url, "")
    path, output = write_many(tmp_path / "in.jsonl", 5), folder / "out.jsonl"
    async with running_worker(redis_url, database):
        status, _, error = await shell("run", path, "-o", output)
    assert (status, sorted(names(output))) == (0, [f"line-{n}" for n in range(5)]), error
    assert {"out.jsonl", "out.jsonl.batch", "out.jsonl.batch.db"} == {
        found.name for found in folder.iterdir()
    }
    again, _, error = await shell("run", path, "-o", output)
    assert (again, num_lines(output)) == (0, 5), error
