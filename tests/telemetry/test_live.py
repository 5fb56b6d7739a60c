"""A running worker's output: JSON log lines with job ids but no text, metrics, heartbeats."""

import asyncio
import io
import json
import logging
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.queue import Queue, close_queue, open_queue, token
from tests.support.valkey import ControlledValkey
from tests.support.waiting import until
from tests.support.worker import client_of, database_url, running_worker
from tokenmill import AsyncClient
from tokenmill.operations.overview import QueueState
from tokenmill_schemas.control import WorkerStatus
from tokenmill_worker.jobs import JobObserver
from tokenmill_worker.telemetry import configure_logging
from tokenmill_worker.telemetry.exporter import Exporter
from tokenmill_worker.telemetry.queue_metrics import QueueMetrics
from tokenmill_worker.telemetry.worker_status import package_version

pytestmark = pytest.mark.redis
SECRET = "the launch code is 0451"


@pytest.fixture
def json_log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging("info", "json", stream=stream, context={"worker": "w1"})
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[Queue]:
    opened = await open_queue(redis_url)
    yield opened
    await close_queue(opened)


def scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return str(answer.read().decode())


def value(text: str, name: str, **labels: str) -> float:
    """Return the sum of the samples that have these labels."""
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    found = [
        s.value
        for s in samples
        if s.name == f"tokenmill:{name}" and labels.items() <= s.labels.items()
    ]
    assert found, f"no sample {name} with {labels}"
    return sum(found)


async def test_log_lines_are_json_with_job_ids_and_without_text(
    redis_url: str, tmp_path: Path, json_log: io.StringIO
) -> None:
    database = database_url(tmp_path)
    async with (
        running_worker(redis_url, database, log_level="info"),
        client_of(redis_url) as client,
    ):
        good = await client.submit(prompt=SECRET, max_tokens=40, ignore_eos=True, tenant="acme")
        bad = await client.submit(
            messages=[{"role": "user", "content": SECRET}], max_tokens=9, model="another"
        )
        broken = await client.submit(prompt=f"{SECRET} [[fail]]", max_tokens=9)
        answers = [await client.result(job, timeout=60) for job in (good, bad, broken)]
    lines = [json.loads(line) for line in json_log.getvalue().splitlines()]
    logged = {line["job_id"]: line for line in lines if line["logger"] == "tokenmill_worker.jobs"}
    assert {good, bad, broken} <= set(logged)
    assert (logged[good]["message"], logged[good]["completion_tokens"], logged[good]["tenant"]) == (
        "Job succeeded",
        40,
        "acme",
    )
    assert logged[bad]["error"] == "model_not_found"
    assert logged[broken]["error"] == "engine_error"
    assert all(line["worker"] == "w1" for line in lines)
    assert SECRET not in json_log.getvalue()
    assert answers[0].text[:12] not in json_log.getvalue()


async def test_metrics_and_status_change_with_finished_jobs(redis_url: str, tmp_path: Path) -> None:
    database = database_url(tmp_path)
    options: dict[str, Any] = {"model": "synthetic?step_ms=5", "lease_seconds": 0.5}
    async with (
        running_worker(redis_url, database, metrics_port=0, **options) as worker,
        client_of(redis_url) as client,
    ):
        assert worker.health_port is not None
        jobs = [
            await client.submit(prompt="a", max_tokens=30, ignore_eos=True, tenant=t)
            for t in ("acme", "acme", "")
        ]
        statuses: list[WorkerStatus] = []
        for job in jobs:
            async for _ in client.stream(job):
                statuses += await client.workers() if len(statuses) < 60 else []
        text = await asyncio.to_thread(scrape, worker.health_port)
        ready = json.loads(await asyncio.to_thread(scrape, worker.health_port, "/readyz"))
    assert ready["checks"] == dict.fromkeys(
        ("engine", "steps", "claims", "redis", "sql", "buffer", "drain"), "ok"
    )
    assert value(text, "build_info", version=package_version()) == 1
    assert {status.version for status in statuses} == {package_version()}
    assert value(text, "generation_tokens_total") == 90
    assert abs(value(text, "clock_skew_seconds")) < 30  # one machine
    # each token but the firsts
    assert value(text, "inter_token_latency_seconds_count", priority="standard") == 87
    assert value(text, "request_success_total", finished_reason="length") == 3
    assert value(text, "deliveries_total", redelivered="false", outcome="run") == 3
    assert value(text, "engine_step_seconds_count") == value(text, "engine_steps_total") >= 30
    assert (
        value(text, "request_prefill_time_seconds_count")
        == value(text, "request_decode_time_seconds_count")
        == 3
    )
    assert (
        value(text, "redis_round_trips_total", script="append")
        <= value(text, "engine_steps_total") + 3
    )
    assert value(text, "sql_commit_seconds_count") == value(text, "sql_commits_total") >= 1
    assert max(status.tokens_per_s for status in statuses) > 0
    assert any(status.first_token_ms and status.token_ms for status in statuses)
    assert any(
        status.tenants.get("acme") and status.tenants["acme"].running == 2 for status in statuses
    )


async def test_refused_tokens_and_failed_calls_are_counted(queue: Queue) -> None:
    refusals: list[tuple[str, int]] = []
    calls: list[tuple[str, int, bool]] = []

    class Noting(JobObserver):
        def called(self, script: str, seconds: float, round_trips: int, is_done: bool) -> None:
            calls.append((script, round_trips, is_done))

        def refused(self, call: str, count: int) -> None:
            refusals.append((call, count))

    worker, other = queue.worker("w1"), queue.worker("w2")
    worker.observer = Noting()
    await queue.submit()
    (delivery,) = await worker.claim(1)
    await worker.release([(delivery.job_id, delivery.token, False)])
    await other.claim(1)
    await worker.append([token(delivery, 0)])
    await worker.release([(delivery.job_id, delivery.token, False)])
    assert refusals == [("append", 1), ("release", 1)]
    assert calls == [
        ("claim", 1, True),
        ("release", 1, True),
        ("append", 1, True),
        ("release", 1, True),
    ]


async def test_a_failing_read_of_the_queue_is_logged_once_and_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(AsyncClient):
        broken = True

        async def overview(self) -> QueueState:
            if self.broken:
                raise RuntimeError("nobody thought of this")
            return await super().overview()

    client = Odd("redis://127.0.0.1:1/0", queue="q")
    queue = QueueMetrics(client)
    await queue.read()
    await queue.read()
    assert queue.problem() == "the queue q cannot be read from Redis"
    assert (
        len([record for record in caplog.records if "cannot be read from Redis" in record.message])
        == 1
    )
    await client.close()


async def test_the_exporter_reports_queues_without_workers_and_an_unreachable_server(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    server = make_valkey()
    exporter = Exporter(server.url, ["q", "other"], "tm:", "127.0.0.1", 0, every_s=0.1)
    await exporter.start()
    try:
        async with client_of(server.url) as client:
            for _ in range(3):
                await client.submit(prompt="a", priority="bulk", max_tokens=10)

        async def sees(name: str, wanted: float, **labels: str) -> bool:
            text = await asyncio.to_thread(scrape, exporter.port)
            try:
                return value(text, name, **labels) == wanted
            except AssertionError:  # this queue has not been read yet; the other may have been
                return False

        await until(lambda: sees("queue_jobs", 3, queue="q", priority="bulk"))
        text = await asyncio.to_thread(scrape, exporter.port)
        assert value(text, "queue_oldest_seconds", queue="q", priority="bulk") > 0
        assert value(text, "queue_workers", queue="q") == 0
        assert value(text, "queue_workers_starting", queue="q") == 0
        assert value(text, "queue_workers_wanted", queue="q") == 1
        assert value(text, "queue_workers_wanted", queue="other") == 0
        assert value(text, "queue_jobs", queue="other") == 0
        assert value(text, "queue_up") == 2
        assert text.count("# TYPE tokenmill:queue_jobs ") == 1
        server.stop()
        await until(lambda: sees("queue_up", 0))
        with pytest.raises(urllib.error.HTTPError, match="503"):
            await asyncio.to_thread(scrape, exporter.port, "/healthz")
    finally:
        await exporter.stop()


async def test_the_exporter_reports_memory_and_a_server_that_evicts_with_the_rights_of_a_reader(
    make_valkey: Callable[..., ControlledValkey], tmp_path: Path
) -> None:
    rules = tmp_path / "users.acl"
    rules.write_text((Path(__file__).parents[2] / "ops/deploy/redis/users.acl").read_text())
    limits = {"maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"}
    server = make_valkey(settings={"aclfile": str(rules), **limits})
    url = server.url.replace("://", "://reader:change-me-reader@")
    exporter = Exporter(url, ["q"], "tm:", "127.0.0.1", 0, every_s=0.1)
    await exporter.start()
    try:

        async def is_read() -> bool:
            text = await asyncio.to_thread(scrape, exporter.port)
            return "redis_memory_bytes{" in text and "queue_jobs{" in text

        await until(is_read)
        text = await asyncio.to_thread(scrape, exporter.port)
        assert value(text, "redis_memory_limit_bytes", queue="q") == 64 * 2**20
        assert 0 < value(text, "redis_memory_bytes", queue="q") < 64 * 2**20
        with pytest.raises(urllib.error.HTTPError) as failing:
            await asyncio.to_thread(scrape, exporter.port, "/healthz")
        assert b"maxmemory-policy is allkeys-lru" in failing.value.read()
        with server.client(username="operator", password="change-me-operator") as operator:
            assert operator.acl_log() == []
    finally:
        await exporter.stop()
