"""The example backend's answers: its login, statuses, double submissions, and resumed events."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest

from tests.examples.conftest import Backend
from tests.support.worker import client_of, running_worker

pytestmark = pytest.mark.redis


async def call(
    backend: Backend,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
) -> tuple[int, str]:
    def send() -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        fields = {
            "Content-Type": "application/json",
            "Cookie": "visitor=somebody",
            **(headers or {}),
        }
        request = urllib.request.Request(backend.url + path, data, fields, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(send)


def events(text: str) -> list[dict[str, Any]]:
    """Return the fields of each event that has data."""
    blocks = [
        dict(line.split(": ", 1) for line in block.splitlines())
        for block in text.split("\n\n")
        if block
    ]
    return [block for block in blocks if "data" in block]


@pytest.mark.slow
async def test_the_backend_answers_statuses_double_submissions_and_resumed_events(
    redis_url: str, backend: Backend
) -> None:
    """One test checks all, since the start of a server takes long."""
    async with client_of(redis_url, backend.database) as client:
        await client.set_queue_limit(1)  # no worker takes a job yet
        assert [
            (await call(backend, "/api/jobs", {"prompt": word}))[0] for word in ("room", "none")
        ] == [201, 429]
        await client.set_queue_limit(100)
        async with running_worker(redis_url, backend.database):
            job = await submit_twice(backend)
            result = await client.result(job, timeout=30)
            await events_resume_where_the_reader_was(backend, job, result.text)
            await refusals_have_their_statuses(backend)
            await a_login_makes_a_user_who_sees_own_jobs_alone(backend, job)
            await client.set_limits(rate=0.001, burst=1)
            assert (await call(backend, "/api/jobs", {"prompt": "once"}))[0] == 201
            status, received = await call(backend, "/api/jobs", {"prompt": "twice"})
            assert (status, "faster than it may" in received) == (429, True)


async def submit_twice(backend: Backend) -> str:
    wanted, key = {"prompt": "Hi", "max_tokens": 30}, {"Idempotency-Key": "k1"}
    first, second = [
        json.loads((await call(backend, "/api/jobs", wanted, key))[1]) for _ in range(2)
    ]
    assert first == {"job_id": second["job_id"], "is_new": True}
    assert second["is_new"] is False
    conflict, _ = await call(backend, "/api/jobs", {"prompt": "another"}, key)
    assert conflict == 422
    return str(first["job_id"])


async def events_resume_where_the_reader_was(backend: Backend, job: str, text: str) -> None:
    everything = events((await call(backend, f"/api/jobs/{job}/events"))[1])
    assert "".join(json.loads(event["data"])["text"] for event in everything[:-1]) == text
    assert everything[-1]["event"] == "end"
    assert json.loads(everything[-1]["data"])["usage"]["completion_tokens"] == len(everything) - 1
    middle = len(everything) // 2  # an answer drawn at random may be short
    seen = {"Last-Event-ID": everything[middle - 1]["id"]}
    assert (
        events((await call(backend, f"/api/jobs/{job}/events", headers=seen))[1])
        == everything[middle:]
    )
    assert (await call(backend, f"/api/jobs/{job}/events", headers={"Last-Event-ID": "x"}))[
        0
    ] == 422


async def refusals_have_their_statuses(backend: Backend) -> None:
    assert (await call(backend, "/api/jobs", {"prompt": ""}))[0] == 422
    assert (await call(backend, "/api/jobs", {"prompt": "a", "max_tokens": 0}))[0] == 422
    assert (await call(backend, "/api/jobs/unknown"))[0] == 404
    assert (await call(backend, "/api/history", headers={"Cookie": ""}))[0] == 401
    assert (await call(backend, "/api/history?limit=1000"))[0] == 422


async def a_login_makes_a_user_who_sees_own_jobs_alone(backend: Backend, job: str) -> None:
    """The job is another user's: it counts as not found, and can be neither read nor cancelled."""

    def log_in() -> tuple[str, str]:
        request = urllib.request.Request(f"{backend.url}/api/login", b"", method="POST")
        with urllib.request.urlopen(request, timeout=30) as response:
            cookie, _, rules = response.headers["Set-Cookie"].partition("; ")
            return cookie, rules

    cookie, rules = await asyncio.to_thread(log_in)
    assert "HttpOnly" in rules
    own = {"Cookie": cookie}
    assert await call(backend, "/api/history", headers=own) == (200, "[]")
    for path, method in (("", None), ("/events", None), ("/cancel", "POST")):
        answer = await call(backend, f"/api/jobs/{job}{path}", headers=own, method=method)
        assert answer[0] == 404, path
    cancelled = json.loads(
        (await call(backend, "/api/jobs", {"prompt": "Own", "max_tokens": 4_000}, own))[1]
    )["job_id"]
    assert (await call(backend, f"/api/jobs/{cancelled}/cancel", headers=own, method="POST"))[
        0
    ] == 200
