"""The commands as a user types them, in processes of their own, beside a running worker."""

import asyncio
import json
import os
import sys

import pytest

from tests.support.worker import QUEUE, database_url, running_worker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]


class Shell:
    def __init__(self, redis_url, database):
        self.where = {
            "TOKENMILL_REDIS_URL": redis_url,
            "TOKENMILL_DATABASE_URL": database,
            "TOKENMILL_QUEUE": QUEUE,
        }

    async def run(self, *arguments, **variables):
        """Run `tokenmill ARGUMENTS`; return (status, standard output, standard error)."""
        environment = {**os.environ, **self.where, "COLUMNS": "160", **variables}  # noqa: TID251 - the child's
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tokenmill.cli", *arguments, env=environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, error = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, out.decode(), error.decode()


@pytest.fixture
def shell(redis_url, tmp_path):
    return Shell(redis_url, database_url(tmp_path))


async def test_a_job_is_submitted_streamed_and_shown_from_the_command_line(redis_url, shell):
    async with running_worker(redis_url, shell.where["TOKENMILL_DATABASE_URL"]):
        status, out, error = await shell.run("submit", "Hello", "--max-tokens", "12", "--seed", "3")
        assert status == 0, error
        job = out.strip()
        status, answer, _ = await shell.run("result", job)
        assert status == 0
        _, printed, _ = await shell.run("tail", job)
        assert printed == answer
        _, described, _ = await shell.run("status", job, "--json")
        assert json.loads(described)["status"] == "succeeded"
        _, listed, _ = await shell.run("jobs", "--json")
        assert job in listed
        _, used, _ = await shell.run("usage", "--json")
        assert '"completion_tokens": 12' in used or '"generated": 12' in used, used
        status, streamed, _ = await shell.run(
            "submit", "Hello", "--max-tokens", "12", "--seed", "3", "--stream"
        )
        assert status == 0
        assert streamed.strip() == answer.strip()  # the same seed, the same text


async def test_every_piece_of_several_answers_is_labelled(redis_url, shell):
    async with running_worker(redis_url, shell.where["TOKENMILL_DATABASE_URL"]):
        asked = ("submit", "Hello", "--max-tokens", "12", "--seed", "3", "--ignore-eos", "--n", "2")
        status, printed, error = await shell.run(*asked, "--stream")
        assert status == 0, error
        assert printed.startswith("[0] ")
        assert "\n[1] " in printed
        status, printed, error = await shell.run("submit", "Hello", "--max-tokens", "4", "--stream")
        assert not printed.startswith("[0]")


async def test_continuations_are_scored_from_the_command_line(redis_url, shell):
    async with running_worker(redis_url, shell.where["TOKENMILL_DATABASE_URL"]):
        status, printed, error = await shell.run("score", "Hello", " you", "!")
        assert status == 0, error
        assert printed.splitlines() == ["   -2.0000     4  ' you'", "   -0.5000     1  '!'"]
        _, whole, _ = await shell.run("score", "Hello", " you", "--json")
        assert len(json.loads(whole)["choices"][0]["logprobs"]) == 4
        status, _, error = await shell.run("score", "Hello", "")
        assert status != 0
        assert "Traceback" not in error
        assert "continuations[0] is empty; it needs at least one token" in error


async def test_a_running_job_is_cancelled_from_the_command_line(shell):
    _, out, _ = await shell.run("submit", "never run", "--max-tokens", "5")
    job = out.strip()
    status, _, error = await shell.run("cancel", job)
    assert status == 0, error
    _, described, _ = await shell.run("status", job, "--json")
    assert json.loads(described)["status"] == "cancelled"
    status, _, error = await shell.run("result", job)
    assert status == 1
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("status", "no-such-job"), "no-such-job"),
        (("submit", ""), "prompt"),
        (("submit", "hi", "--temperature", "-3"), "temperature"),
    ],
)
async def test_each_command_error_is_one_sentence_and_an_exit_status(shell, arguments, says):
    status, _, error = await shell.run(*arguments)
    assert status != 0
    assert says in error
    assert "Traceback" not in error


async def test_an_unreachable_server_is_an_error_of_one_sentence(shell):
    status, _, error = await shell.run("submit", "hi", "--redis-url", "redis://127.0.0.1:1/0")
    assert status != 0
    assert "127.0.0.1:1" in error
    assert "Traceback" not in error


async def test_a_worker_names_every_wrong_setting_at_once(shell):
    wrong = {
        "TOKENMILL_LEASE_SECONDS": "soon",
        "TOKENMILL_LEASE_SECOND": "1",
        "TOKENMILL_REDIS_URL": "http://x",
    }
    status, _, error = await shell.run("worker", "--max-num-seqs", "-1", **wrong)
    assert status == 2
    for name in (
        "TOKENMILL_LEASE_SECONDS",
        "TOKENMILL_LEASE_SECOND ",
        "TOKENMILL_REDIS_URL",
        "--max-num-seqs",
    ):
        assert name in error
    assert "did you mean TOKENMILL_LEASE_SECONDS" in error


@pytest.mark.parametrize("command", ["worker", "doctor"])
async def test_an_engine_that_contradicts_the_model_ends_a_start_with_its_sentence(shell, command):
    status, _, error = await shell.run(command, "--engine", "own", "--model", "synthetic")
    assert status == 2
    assert "--engine must not be own: the model synthetic is of the engine synthetic" in error
    assert "Traceback" not in error


async def test_a_missing_database_is_named_and_not_created(tmp_path, shell):
    path = tmp_path / "folder" / "misspelt.db"
    status, _, error = await shell.run(
        "worker", "--database-url", f"sqlite:///{path}", "--model", "synthetic"
    )
    assert (status, path.parent.exists()) == (1, False)
    assert f"there is no database at {path}: `tokenmill db upgrade` makes it" in error
    status, _, error = await shell.run("tasks", "--database-url", f"sqlite:///{path}")
    assert (status, path.parent.exists()) == (1, False)
    assert f"there is no database at {path}" in error


async def test_a_file_that_is_not_a_database_ends_a_start_at_once(tmp_path, shell):
    path = tmp_path / "notes.txt"
    path.write_text("these are no tables\n" * 100)
    status, _, error = await shell.run(
        "worker", "--database-url", f"sqlite:///{path}", "--model", "synthetic"
    )
    assert status == 1
    assert "file is not a database" in error
    assert "trying again for" not in error


async def test_a_wrong_password_ends_a_start_at_once(redis_url, shell):
    wrong = redis_url.replace("redis://", "redis://nobody:wrong@")
    status, _, error = await shell.run("worker", "--redis-url", wrong, "--model", "synthetic")
    assert status == 1
    assert "Redis refuses this user: invalid username-password pair" in error
    assert "trying again for" not in error
    status, _, error = await shell.run("tasks", "--redis-url", wrong)
    assert (status, "Redis refuses this user: invalid username-password pair" in error) == (1, True)
    status, _, error = await shell.run("exporter", "--redis-url", wrong, "--metrics-port", "0")
    assert (status, "Redis refuses this user: invalid username-password pair" in error) == (1, True)
    status, out, _ = await shell.run("doctor", "-q", "--redis-url", wrong)
    assert (status, "redis://user:password@host:6379/0" in out) == (1, True)


async def test_a_failed_start_prints_its_reason_last_without_shutdown_lines(tmp_path, shell):
    status, _, error = await shell.run("worker", "--model", f"{tmp_path}/none")
    assert status == 2
    assert error.splitlines()[-1] == f"Error: there is no folder or file {tmp_path}/none"
    assert "Handing over" not in error
    assert "Shutting down" not in error


async def test_doctor_names_an_unreachable_server(shell):
    status, out, error = await shell.run("doctor", "--redis-url", "redis://127.0.0.1:1/0")
    assert status == 1
    assert "redis" in out + error
    assert "Traceback" not in error
    assert "error" in out.splitlines()[-1]


async def test_db_upgrade_makes_the_tables(tmp_path, shell):
    new = f"sqlite:///{tmp_path}/new.db"
    status, _, error = await shell.run("db", "upgrade", "--database-url", new)
    assert status == 0, error
    status, out, _ = await shell.run("jobs", "--json", TOKENMILL_DATABASE_URL=new)
    assert (status, json.loads(out)) == (0, [])
