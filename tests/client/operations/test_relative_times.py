"""Times that count from now are the server's, whatever this clock shows; absolute ones stay."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from celery import Celery

from tokenmill import AsyncClient, Client, InvalidRequest
from tokenmill.celery import generation_task
from tokenmill.transport.server_clock import ServerClock

pytestmark = pytest.mark.redis

SHIFTS = [3_600, -3_600, 90, -90]
NOON = datetime(2100, 1, 1, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def nothing_runs(allowed_keys: list[str]) -> None:
    allowed_keys.append("tm:{q}:*")


def shifted(seconds: int) -> ServerClock:
    return ServerClock(wall=lambda: time.time_ns() + seconds * 1_000_000_000)


def after_now(moment_ms: int) -> float:
    return moment_ms / 1000 - time.time()


def check(info: Any) -> None:
    assert 30 < after_now(info.deadline_ms) <= 61
    assert 10 < after_now(info.not_before_ms) <= 41
    assert -30 < after_now(info.created_ms) <= 1


RELATIVE: dict[str, Any] = {"deadline": 60, "not_before": timedelta(seconds=40)}


@pytest.mark.parametrize("shift", SHIFTS)
async def test_a_relative_deadline_and_delay_count_by_the_server_s_clock(
    redis_url: str, shift: int
) -> None:
    with Client(redis_url, queue="q") as client:
        client.clock = shifted(shift)
        check(client.status(client.submit(prompt="x", **RELATIVE)))
    async with AsyncClient(redis_url, queue="q") as aclient:
        aclient.clock = shifted(shift)
        jobs = await aclient.submit_many([{"prompt": "x", **RELATIVE}] * 2)
        for job in jobs:
            check(await aclient.status(job))


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_task_s_countdown_and_expires_count_by_the_server_s_clock(
    redis_url: str, shift: int
) -> None:
    app = Celery("clocks", broker="memory://", backend="cache+memory://")
    task = generation_task(app, queue="q", url=redis_url)
    task.client.clock = shifted(shift)
    sent = task.apply_async(("x",), countdown=40, expires=60)
    check(task.client.status(sent.id))
    task.client.close()


def test_absolute_times_are_stored_unchanged(redis_url: str) -> None:
    with Client(redis_url, queue="q") as client:
        client.clock = shifted(3_600)
        given = NOON.timestamp()
        job = client.submit(prompt="x", deadline=NOON, not_before=given - 60)
        info = client.status(job)
    assert (info.deadline_ms, info.not_before_ms) == (given * 1000, (given - 60) * 1000)


@pytest.fixture
def readings(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as server:

        def count() -> int:
            found: Any = server.info("commandstats")
            return int(found.get("cmdstat_time", {"calls": 0})["calls"])

        def asked() -> int:
            """Return how often clients asked; each script asks once too."""
            found: Any = server.info("commandstats")
            scripts = sum(
                int(found.get(f"cmdstat_{name}", {"calls": 0})["calls"])
                for name in ("eval", "evalsha")
            )
            failed: Any = server.info("errorstats")
            return count() - scripts + int(failed.get("errorstat_NOSCRIPT", {"count": 0})["count"])

        yield asked


def test_the_server_is_asked_once_and_only_for_relative_times(
    redis_url: str, readings: Any
) -> None:
    with Client(redis_url, queue="q") as client:
        before = readings()
        client.submit_many([{"prompt": "x"}] * 3)
        client.submit(prompt="x", deadline=NOON)
        assert readings() == before
        client.submit(prompt="x", deadline=60)
        first = readings()
        assert before < first <= before + 4  # a slow reply is followed by another
        for _ in range(3):
            client.submit(prompt="x", deadline=60)
        assert readings() == first


def test_an_invalid_request_is_refused_before_the_server_is_asked() -> None:
    with (
        Client("redis://localhost:1/0", queue="q") as client,
        pytest.raises(InvalidRequest, match="max_tokens"),
    ):
        client.submit(prompt="x", deadline=60, max_tokens=0)
