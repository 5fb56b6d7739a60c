"""`tokenmill tasks`, a process of its own, beside a worker: a job's end reaches its webhook, a file
its answers.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.record.support import rows
from tests.support.worker import QUEUE, running_worker
from tests.tasks.receiver import Receiver, eventually
from tests.tasks.support import SECRET
from tokenmill import Client
from tokenmill.sql.engine import open_engine
from tokenmill.webhooks import tenant_secret, verify
from tokenmill_worker.local.valkey_server import free_port

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(300)]


@contextlib.contextmanager
def tasks(redis_url: str, database: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    variables = {
        "REDIS_URL": redis_url, "DATABASE_URL": database, "QUEUE": QUEUE, "MODEL": "synthetic",
        "WEBHOOK_SECRET": SECRET, "WEBHOOK_NETWORKS": "127.0.0.0/8,::1",
        "LOG_LEVEL": "info",
    }  # fmt: skip
    environment = os.environ | {f"TOKENMILL_{name}": value for name, value in variables.items()}  # noqa: TID251
    command = [sys.executable, "-m", "tokenmill.cli", "tasks"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=log.parent,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                assert process.wait(60) == 0, log.read_text()


def call(task: str, redis_url: str, database: str, *arguments: str) -> None:
    """Start a task from the shell, as another application of Celery's does."""
    command = [
        sys.executable, "-m", "celery", "-A", "tokenmill_worker.tasks", "call", task,
        "--serializer", "msgpack", *arguments,
    ]  # fmt: skip
    variables = {
        "TOKENMILL_REDIS_URL": redis_url,
        "TOKENMILL_DATABASE_URL": database,
        "TOKENMILL_QUEUE": QUEUE,
    }
    environment = os.environ | variables  # noqa: TID251
    folder = Path(__file__).parents[2]
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=folder)


def die(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its beat at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


async def test_the_tasks_process_delivers_webhooks_and_imports_files(
    redis_url: str, sqlite_url: str, tmp_path: Path, allowed_keys: list[str]
) -> None:
    import asyncio

    allowed_keys += ["tm:tasks:*", "tm:{q}:meta"]
    async with running_worker(redis_url, sqlite_url):
        await asyncio.to_thread(_follow_webhooks, redis_url, sqlite_url, tmp_path)
        await asyncio.to_thread(_answer_a_file, redis_url, sqlite_url, tmp_path)


def _follow_webhooks(redis_url: str, database: str, folder: Path) -> None:
    """Kill the sending process in the middle of a delivery; the next one sends the same again."""
    hold = threading.Event()
    with Receiver(hold=hold) as receiver, Client(redis_url, queue=QUEUE) as client:
        job = client.submit(prompt="a b c", max_tokens=3, webhook=receiver.url, tenant="acme")
        client.result(job, timeout=60)
        with tasks(redis_url, database, folder / "first.log") as process:
            receiver.wait_for(1)
            die(process)
        hold.set()
        engine = open_engine(database)
        with engine.begin() as connection:  # as if the claim's time were up
            assert (
                connection.execute(
                    sa.text("UPDATE webhooks SET due_ms = 0 WHERE state = 'sending'")
                ).rowcount
                == 1
            )
        engine.dispose()
        with tasks(redis_url, database, folder / "second.log"):
            eventually(
                lambda: rows(database, "SELECT state FROM webhooks") == [{"state": "delivered"}]
            )
            call("tokenmill.usage.roll_up", redis_url, database)
            eventually(
                lambda: rows(database, "SELECT sum(jobs) AS n FROM usage_daily") == [{"n": 1}]
            )
        events = [
            verify(seen.body, seen.headers, tenant_secret(SECRET, "acme"))
            for seen in receiver.received
        ]
        assert {event.data.job_id for event in events} == {str(job)}
        assert len({seen.headers["webhook-id"] for seen in receiver.received}) == 1
        assert len(events) == 2
    assert not list(folder.glob("*beat*")), "beat is to keep nothing"


def _answer_a_file(redis_url: str, database: str, folder: Path) -> None:
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "synthetic", "prompt": f"number {n}", "max_tokens": 2}}
        for n in range(20)
    ]  # fmt: skip
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + "nonsense\n")
    order = json.dumps({"source": str(source), "output": str(output)})
    with tasks(redis_url, database, folder / "bulk.log"):
        call("tokenmill.bulk.import", redis_url, database, "--kwargs", order)
        eventually(lambda: rows(database, "SELECT state FROM batches") == [{"state": "completed"}])
        eventually(output.exists)
        eventually(lambda: len(output.read_text().splitlines()) == 20)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {f"line-{n}" for n in range(20)}
    assert all(
        answer["response"]["body"]["usage"]["completion_tokens"] in (1, 2) for answer in answers
    )
    assert len((folder / "out.errors.jsonl").read_text().splitlines()) == 1


def test_the_tasks_process_ends_though_its_broker_was_never_reachable(
    sqlite_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with tasks(f"redis://127.0.0.1:{free_port()}/0", sqlite_url, log) as process:
        eventually(lambda: "Cannot connect" in log.read_text() and "beat" in log.read_text())
        process.terminate()
        try:
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
