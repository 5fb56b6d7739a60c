"""A whole worker process at its most talkative, through good and bad: no prompt, answer or password
in anything that operators, collectors and backups read. `TOKENMILL_LOG_PROMPTS` is the one way in,
and off.
"""

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.support.worker import QUEUE, database_url, settings
from tokenmill import AsyncClient
from tokenmill.errors import InvalidRequest
from tokenmill_schemas.job import RetryPolicy
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobStatus

# several processes start, one by one
pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(300)]

MARK = "xyzzy-heron-17"
PASSWORD = "pw-quagga-23"


@contextlib.contextmanager
def worker_process(folder: Path, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`tokenmill worker`; what it says goes to `folder/said`."""
    variables = {f"TOKENMILL_{name.upper()}": str(value) for name, value in settings.items()}
    with (folder / "said").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "default", "-m", "tokenmill.cli", "worker"],
            stdout=output, stderr=subprocess.STDOUT, env=os.environ | variables,  # noqa: TID251
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60)


async def first(folder: Path, pattern: str) -> str:
    """Wait until the worker's output matches `pattern`, and return the first group."""
    async with asyncio.timeout(60):
        while True:
            found = re.search(pattern, (folder / "said").read_text(errors="replace"))
            if found:
                return found[1]
            await asyncio.sleep(0.05)


def looked_at(port: str, page: str) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=20) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:  # failing health is a page as well
        return str(error.read().decode())


async def test_logs_metrics_and_traces_hold_no_prompt_answer_or_password(make_valkey, tmp_path):
    server = make_valkey(settings={"requirepass": PASSWORD})
    url = server.url.replace("redis://", f"redis://:{PASSWORD}@")
    database = database_url(tmp_path)
    chosen = {
        "redis_url": url, "database_url": database, "queue": QUEUE, "model": "synthetic?step_ms=1",
        "lease_seconds": 2, "max_crashes": 2, "log_level": "debug",
        "log_format": "json",
        "metrics_port": 0, "metrics_host": "127.0.0.1",
    }  # fmt: skip
    with worker_process(tmp_path, **chosen) as process:
        port = await first(tmp_path, r"http://127\.0\.0\.1:(\d+)")
        async with AsyncClient(url, queue=QUEUE, database=database) as client:
            answers = await through_good_and_bad(client, tmp_path / "tokenmill.db")
            pages = [looked_at(port, page) for page in ("metrics", "healthz", "livez", "nothing")]
            status = [str(worker) for worker in await client.workers()]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    output = (tmp_path / "said").read_text(errors="replace")
    assert "job" in output, "the worker was to be talkative"
    for private in (MARK, PASSWORD, *answers):
        assert private not in output, lines_with(private, output)
        assert not any(private in page for page in [*pages, *status]), private


def lines_with(words: str, text: str) -> str:
    return "\n".join(line for line in text.splitlines() if words in line)[:2_000]


async def through_good_and_bad(client: AsyncClient, database: Path) -> list[str]:
    """Run a job for every way to end; return pieces of the answers."""
    keys, redis = client.keys, client._redis
    # a row that the database refuses, so that its driver complains of values
    with sqlite3.connect(database) as sql:
        sql.execute(
            "CREATE TRIGGER no BEFORE INSERT ON jobs "
            "WHEN NEW.error_code = 'model_not_found' AND NEW.params IS NOT NULL "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
    good = [
        await client.submit(prompt=f"{MARK} {i}", max_tokens=40, ignore_eos=True, seed=i)
        for i in range(3)
    ]
    chat = [{"role": "user", "content": MARK}]
    bad = {
        "fails": await client.submit(
            prompt=f"[[fail]] {MARK}", retry=RetryPolicy(max_attempts=2, backoff_ms=1)
        ),
        "refused": await client.submit(prompt=MARK * 3000, max_tokens=5),
        "model": await client.submit(prompt=MARK, model="other", metadata={"m": MARK}, stop=[MARK]),
        "template": await client.submit(messages=chat, max_tokens=5),
        "structured": await client.submit(
            prompt=MARK, response_format={"regex": f"({MARK}"}, max_tokens=5
        ),
        "late": await client.submit(prompt=MARK, deadline=0.001, max_tokens=5),
    }  # fmt: skip
    for name, payload in (
        ("bytes", f"\xc1 {MARK}".encode()),
        ("type", msgpack.packb({"job_id": 1, "prompt": MARK})),
    ):
        bad[name] = await client.submit(prompt="x", not_before=4_000_000_000)
        await redis.hset(keys.job(bad[name]), "request", payload)
        await redis.zadd(keys.delayed, {str(bad[name]): 1})
    with pytest.raises(InvalidRequest) as refused:
        await client.submit(prompt=f"{MARK}\ud800", temperature=-1)
    assert MARK not in str(refused.value)
    for worker in await client.workers():
        await redis.publish(keys.control(worker.worker_id), f"\xc1{MARK}")
    results = [await client.result(job, timeout=60) for job in good]
    assert {result.status for result in results} == {JobStatus.SUCCEEDED}
    ended = {name: (await client.result(job, timeout=60)).status for name, job in bad.items()}
    assert ended.pop("late") is JobStatus.EXPIRED
    assert ended.pop("template") in (JobStatus.FAILED, JobStatus.SUCCEEDED)
    assert set(ended.values()) == {JobStatus.FAILED}, ended
    crash = await client.submit(prompt=f"[[crash]] {MARK}", max_tokens=5)
    beside = await client.submit(prompt=f"{MARK} beside", max_tokens=40, ignore_eos=True)
    assert (await client.result(crash, timeout=90)).status is JobStatus.DEAD
    results.append(await client.result(beside, timeout=60))
    assert MARK not in str(await client.dead())
    with sqlite3.connect(database) as sql:  # the table is gone while jobs end, and comes back
        sql.execute("ALTER TABLE jobs RENAME TO away")
    late = await client.submit(prompt=f"{MARK} in between", max_tokens=40, ignore_eos=True)
    await asyncio.sleep(1.0)
    with sqlite3.connect(database) as sql:
        sql.execute("ALTER TABLE away RENAME TO jobs")
    results.append(await client.result(late, timeout=60))
    return [result.text[:24] for result in results]


async def test_tables_and_log_hold_prompts_only_with_the_setting(redis_url, tmp_path):
    """The tables hold answers by design, and prompts only by a setting."""
    for record, expected in (("false", False), ("true", True)):
        folder = tmp_path / record
        folder.mkdir()
        database = database_url(folder)
        chosen = {
            "redis_url": redis_url,
            "database_url": database,
            "queue": QUEUE,
            "model": "synthetic",
        }
        with worker_process(folder, record_prompts=record, log_prompts=record, **chosen):
            async with AsyncClient(redis_url, queue=QUEUE) as client:
                job = await client.submit(
                    prompt=MARK, max_tokens=5, stop=["heron"], ignore_eos=True
                )
                assert (await client.result(job, timeout=60)).status is JobStatus.SUCCEEDED
        with sqlite3.connect(folder / "tokenmill.db") as sql:
            rows = "\n".join(sql.iterdump())
        assert (MARK in rows) is expected
        assert (MARK in (folder / "said").read_text()) is expected


BAD_URLS = {
    "redis": (
        f"redis://:{PASSWORD}@127.0.0.1:1/0", f"redis://u:{PASSWORD}/x@host:6379", f"redis://:x@h:{PASSWORD}",
        f"redis+cluster://:{PASSWORD}/w@h:1", f"redis://:{PASSWORD}@h/1?socket_timeout={PASSWORD}",
    ),
    "database": (f"postgresql://u:{PASSWORD}@127.0.0.1:1/db", f"postgresql://u:x@h:{PASSWORD}/db", f"mysql://:{PASSWORD}@h"),
}  # fmt: skip
COMMANDS = {
    "redis": (["doctor"], ["worker"]),
    "database": (["usage"], ["worker"]),
}


def output_of(words: list[str], folder: Path, variables: dict[str, str]) -> str:
    """Return a command's output. A worker that waits for its servers is interrupted."""
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "tokenmill.cli", *words]
        environment = os.environ | variables  # noqa: TID251
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + 90
            while (
                process.poll() is None
                and not os.fstat(output.fileno()).st_size
                and time.monotonic() < deadline
            ):
                time.sleep(0.1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return output.read().decode(errors="replace")


@pytest.mark.parametrize("kind", BAD_URLS)
def test_no_command_prints_a_password_of_a_url(kind, tmp_path, redis_url):
    """The URLs are unreachable, or no URLs at all."""
    servers = {
        "TOKENMILL_REDIS_URL": redis_url,
        "TOKENMILL_DATABASE_URL": f"sqlite:///{tmp_path}/none.db",
    }
    cases = [(url, words) for url in BAD_URLS[kind] for words in COMMANDS[kind]]

    def run(case: tuple[str, list[str]]) -> str:
        url, words = case
        variables = {f"TOKENMILL_{kind.upper()}_URL": url, "TOKENMILL_MODEL": "synthetic"}
        return output_of(words, tmp_path, servers | variables)

    with ThreadPoolExecutor(3) as pool:
        for case, output in zip(cases, pool.map(run, cases), strict=True):
            assert PASSWORD not in output, (case, lines_with(PASSWORD, output))
            assert "Traceback" not in output, (case, output[-1500:])
            assert output, case


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@h:1/0", "redis://:***@h:1/0"),
        ("postgresql+psycopg://me:p@w@h/db", "postgresql+psycopg://me:***@h/db"),
        ("redis+sentinel://u:pw@a:1,[::1]:2/main/0", "redis+sentinel://u:***@a:1,[::1]:2/main/0"),
        ("redis://u:pw/x@h:1", "redis://u:***@h:1"),
        ("redis://h:pw", "redis://***"),
        ("postgresql://u:x@h:pw/db", "postgresql://***"),
        ("postgresql://h/db?user=u&password=pw", "postgresql://h/db?user=***&password=***"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
    ],
)
def test_settings_are_shown_without_passwords(url, shown):
    chosen = settings("redis://h", "sqlite:///x.db").model_copy(update={"database_url": url})
    assert chosen.public()["database_url"] == shown


def test_redis_keys_hold_no_text():
    """Key names appear in monitoring, so they hold ids and names, never a request's text."""
    keys = Keys("q")
    assert keys.idempotency("t", "k") == "tm:{q}:idem:t:k"
