"""Many clients that send nothing, and many that hardly read: bounded memory, and others are served.

The short form has fewer of them, and does not wait until silent connections are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from redis.asyncio import Redis

from tests.gateway.test_guide import is_ready
from tests.support.waiting import until
from tokenmill_gateway.connection import HEAD_S
from tokenmill_schemas.keys import Keys
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.record import migrate

pytestmark = [pytest.mark.redis, pytest.mark.soak, pytest.mark.timeout(900)]
KB = 1_000
MOST_SILENT = 16 * KB  # of memory for a connection that sends nothing
MOST_UNREAD = 400 * KB  # for a stream that nobody reads: the buffer of its socket, and of asyncio
MODEL = "synthetic?step_ms=20"
WRITE_S = 2
CHAT = {
    "model": "q", "messages": [{"role": "user", "content": "Hello"}], "stream": True,
    "max_tokens": 4_000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20,
}  # fmt: skip


@pytest.fixture
async def gateway(redis_url: str, database: str, tmp_path: Path) -> AsyncIterator[psutil.Process]:
    """The process of a gateway before a worker. Its port is in the variable of its command."""
    migrate.upgrade(database)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tokenmill = str(Path(sys.executable).with_name("tokenmill"))
    port = free_port()
    variables = os.environ | {  # noqa: TID251 - the child's
        "TOKENMILL_REDIS_URL": redis_url, "TOKENMILL_DATABASE_URL": database,
        "TOKENMILL_QUEUE": "q", "TOKENMILL_MODEL": MODEL, "TOKENMILL_MAX_NUM_SEQS": "1024",
    }  # fmt: skip
    command = [
        tokenmill, "gateway", "--open", "--port", str(port), "--write-seconds", str(WRITE_S),
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        worker = GuardedProcess([tokenmill, "worker"], env=variables, output=log)
        process = GuardedProcess(command, env=variables, output=log)
        try:
            await until(lambda: is_ready(port))
            await until(partial(is_answered, port), pause_s=0.2)  # the worker serves too
            yield psutil.Process(process.process.pid)
        finally:
            process.end(signal.SIGTERM)
            worker.end(signal.SIGTERM)


def port_of(gateway: psutil.Process) -> int:
    command = gateway.cmdline()
    return int(command[command.index("--port") + 1])


async def is_answered(port: int) -> bool:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": "q", "prompt": "Hello", "max_tokens": 2},
        )
        return answer.is_success


def connected(port: int) -> socket.socket:
    """Return a connection whose receiver takes only a few bytes."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(2**16)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def test_connections_that_send_nothing_take_little_memory_and_are_closed(
    gateway: psutil.Process, soak_seconds: float
) -> None:
    port, count = port_of(gateway), 10_000 if soak_seconds >= 60 else 500
    before = gateway.memory_info().rss
    silent = []
    for _ in range(count):
        silent.append(connected(port))
        await asyncio.sleep(0)
    try:
        assert await is_answered(port)
        added = gateway.memory_info().rss - before
        print(f"{count} connections add {added / 1e6:.1f} MB")  # noqa: T201
        assert added <= count * MOST_SILENT
        if soak_seconds >= 60:
            await asyncio.sleep(HEAD_S)
            await until(lambda: all(map(is_closed, silent)), timeout_s=60)
    finally:
        for sock in silent:
            sock.close()


async def test_streams_that_are_hardly_read_end_within_bounded_memory(
    gateway: psutil.Process, redis_url: str, database: str, soak_seconds: float
) -> None:
    port, count = port_of(gateway), 1_000 if soak_seconds >= 60 else 50
    data = json.dumps(CHAT).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    before, most = gateway.memory_info().rss, 0
    readers = [connected(port) for _ in range(count)]
    try:
        for sock in readers:
            sock.send(head.encode() + data)

        async with Redis.from_url(redis_url) as redis:

            async def all_are_cancelled() -> bool:
                nonlocal most
                most = max(most, gateway.memory_info().rss)
                for sock in readers[::2]:  # the others read nothing
                    with contextlib.suppress(OSError):
                        sock.recv(1)
                return await redis.hget(Keys("q").meta, "finished:cancelled") == b"%d" % count

            await until(all_are_cancelled, timeout_s=600, pause_s=1)
        added = most - before
        print(f"{count} readers add {added / 1e6:.1f} MB")  # noqa: T201
        assert added <= count * MOST_UNREAD
        assert await is_answered(port)
    finally:
        for sock in readers:
            sock.close()
