"""Connections that misbehave: each gets its status and one sentence, and the next one works."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.gateway.conftest import MODEL, SLOW, Gateway, new_key, running_gateway
from tests.support.waiting import until
from tests.support.worker import QUEUE, client_of, running_worker
from tokenmill_gateway import bodies, connection
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.local.valkey_server import free_port

pytestmark = pytest.mark.redis
POST = b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}
LONG = {"model": SLOW, "input": "Hello", "max_output_tokens": 3_000, "ignore_eos": True}


def sent(body: dict[str, Any], *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = b"".join(f"{line}\r\n".encode() for line in headers)
    return POST + lines + b"content-length: %d\r\n\r\n" % len(data) + data


async def opened(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))


async def refusal_of(gateway: Gateway, data: bytes) -> tuple[int, str]:
    """Send bytes, and return the status and the code of the refusal."""
    reader, writer = await opened(gateway)
    try:
        writer.write(data)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        body = json.loads(await reader.readexactly(int(length[1])))
        return int(head.split()[1]), body["error"]["code"]
    finally:
        writer.close()


@pytest.fixture
async def asking(redis_url: str, database: str) -> AsyncIterator[Gateway]:
    """A gateway that asks for keys, without a worker."""
    async with running_gateway(redis_url, database, is_open=False) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "invalid_request"),
        (POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}", 400,
         "invalid_request"),
        (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400, "invalid_request"),
        (POST + b"x: " + b"y" * 1_000_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (POST + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)) + b"\r\n", 431,
         "headers_too_large"),
        (POST.replace(b"/responses", b"/responses?api_key=tmk-x") + b"content-length: 2\r\n\r\n{}",
         401, "invalid_api_key"),
    ],
    ids=["no HTTP", "two lengths", "two numbers", "1 MB of header", "20,000 headers", "in query"],
)  # fmt: skip
async def test_a_wrong_head_has_its_status_and_the_next_one_works(
    asking: Gateway, data: bytes, status: int, code: str
) -> None:
    assert await refusal_of(asking, data) == (status, code)
    assert await refusal_of(asking, sent(BODY)) == (401, "invalid_api_key")


@pytest.mark.parametrize("away", [("redis",), ("database",), ("redis", "database")], ids="+".join)
async def test_a_request_while_a_server_is_away_is_503_and_the_gateway_is_not_ready(
    redis_url: str, database: str, away: tuple[str, ...]
) -> None:
    key = new_key(database, "acme")
    if "redis" in away:
        redis_url = f"redis://127.0.0.1:{free_port()}/0"
    if "database" in away:
        database = f"postgresql://127.0.0.1:{free_port()}/none"
    async with running_gateway(redis_url, database, is_open=False) as gateway:
        status, _ = await refusal_of(gateway, sent(BODY, f"authorization: Bearer {key}"))
        assert status == 503
        assert await refusal_of(gateway, b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n") == (
            503, "unavailable",
        )  # fmt: skip


async def test_two_authorization_headers_are_refused(asking: Gateway, database: str) -> None:
    line = f"authorization: Bearer {new_key(database, 'acme')}"
    assert await refusal_of(asking, sent(BODY, line, line)) == (401, "invalid_api_key")


async def test_a_head_or_a_body_that_does_not_come_is_a_timeout(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    monkeypatch.setattr(bodies, "LIMIT_S", 0.2)
    for data in (POST, POST + b"content-length: 90\r\n\r\n{"):
        assert await refusal_of(gateway, data) == (408, "request_timeout")
    reader, writer = await opened(gateway)
    assert await reader.read() == b""  # a connection that sends nothing is closed
    writer.close()


async def test_a_body_beyond_its_length_is_refused_and_one_in_parts_is_answered(
    gateway: Gateway,
) -> None:
    reader, writer = await opened(gateway)
    for byte in sent(BODY):
        writer.write(bytes([byte]))
        await writer.drain()
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()
    data = sent(BODY)
    wrong = data.replace(b"length: %d" % len(json.dumps(BODY)), b"length: 3")
    assert (await refusal_of(gateway, wrong))[0] == 400


@pytest.fixture
async def slow(redis_url: str, database: str) -> AsyncIterator[Gateway]:
    """A gateway before a worker of 20 ms a token."""
    async with (
        running_worker(redis_url, database, model=SLOW),
        running_gateway(redis_url, database, models={SLOW: QUEUE}) as gateway,
    ):
        yield gateway


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_hangs_up_cancels_its_answer_but_for_one_with_a_key(
    slow: Gateway, is_stream: bool
) -> None:
    async with client_of(slow.redis_url) as queue:
        kept = await asked_and_left(slow, queue, is_stream, "idempotency-key: k")
        left = await asked_and_left(slow, queue, is_stream)
        assert (await queue.result(left, timeout=60)).status is JobStatus.CANCELLED
        assert (await queue.status(kept)).status is JobStatus.RUNNING
        await queue.cancel(kept)


async def asked_and_left(gateway: Gateway, queue: Any, is_stream: bool, *headers: str) -> str:
    """Ask for a long answer, hang up once it runs, and return its job."""
    before = {info.job_id for info in await queue.list()}
    _, writer = await opened(gateway)
    writer.write(sent({**LONG, "stream": is_stream}, *headers))
    found: list[str] = []

    async def runs() -> bool:
        new = [one for one in await queue.list() if one.job_id not in before]
        found[:] = [one.job_id for one in new if one.status is JobStatus.RUNNING]
        return bool(found)

    await until(runs)
    writer.close()
    return found[0]


async def test_a_reader_that_takes_nothing_loses_its_connection_and_its_answer(
    redis_url: str, database: str
) -> None:
    model = "synthetic?step_ms=2"
    chat = {
        "model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True, "n": 16,
        "max_tokens": 3_000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    async with (
        running_worker(redis_url, database, model=model),
        running_gateway(redis_url, database, models={model: QUEUE}, write_s=0.3) as gateway,
        client_of(redis_url, database) as queue,
    ):
        _, writer = await opened(gateway)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(sent(chat).replace(b"/v1/responses", b"/v1/chat/completions"))

        async def jobs() -> Any:
            return await queue.list()

        await until(jobs)
        result = await queue.result((await jobs())[0].job_id, timeout=60)
        assert result.status is JobStatus.CANCELLED
        writer.transport.abort()


async def test_a_gateway_that_ends_ends_streams_behind_a_whole_event_and_cancels_nothing(
    redis_url: str, database: str
) -> None:
    async with running_worker(redis_url, database, model=SLOW), client_of(redis_url) as queue:
        async with running_gateway(redis_url, database, models={SLOW: QUEUE}) as gateway:
            reader, writer = await opened(gateway)
            writer.write(sent({**LONG, "stream": True}))
            await reader.readuntil(b"output_text.delta")
        rest = await reader.read()
        assert rest.endswith(b"}\n\n\r\n0\r\n\r\n")
        assert b"[DONE]" not in rest
        writer.close()
        (job,) = await queue.list()
        assert job.status is JobStatus.RUNNING
        await queue.cancel(job.job_id)
