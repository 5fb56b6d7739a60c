"""A large upload and its download pass through a gateway in constant memory."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.gateway.test_guide import is_ready
from tests.support.waiting import until
from tokenmill_worker.local.valkey_server import free_port

pytestmark = [pytest.mark.redis, pytest.mark.soak, pytest.mark.timeout(600)]
MB = 1_000_000
MOST_ADDED = 64 * MB
BOUNDARY = b"xxBOUNDARYxx"
HEAD = (
    b'--%(b)s\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--%(b)s\r\nContent-Disposition: form-data; name="file"; filename="big"\r\n\r\n'
) % {b"b": BOUNDARY}
BLOCK = bytes(range(256)) * 4_000


async def test_a_gigabyte_passes_through_a_gateway_within_64_mb(
    redis_url: str, database: str, tmp_path: Path, soak_seconds: float
) -> None:
    blocks = round((1000 if soak_seconds >= 60 else 200) * MB / len(BLOCK))
    port = free_port()
    variables = os.environ | {  # noqa: TID251 - the child's
        "TOKENMILL_REDIS_URL": redis_url,
        "TOKENMILL_DATABASE_URL": database,
        "TOKENMILL_FILES": str(tmp_path / "files"),
        "TOKENMILL_GATEWAY_PORT": str(port),
        "TOKENMILL_GATEWAY_UPLOAD_MB": "1100",
        "TOKENMILL_GATEWAY_OPEN": "true",
    }
    command = [sys.executable, "-m", "tokenmill.cli", "gateway"]
    process = subprocess.Popen(command, env=variables, cwd=tmp_path)  # noqa: ASYNC220
    try:
        await until(lambda: is_ready(port))
        gateway = psutil.Process(process.pid)
        before, most = gateway.memory_info().rss, 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal most
            yield HEAD
            for _ in range(blocks):
                yield BLOCK
                most = max(most, gateway.memory_info().rss)
            yield b"\r\n--%b--\r\n" % BOUNDARY

        url = f"http://127.0.0.1:{port}/v1/files"
        kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
        async with httpx.AsyncClient(timeout=300) as client:
            answer = await client.post(url, content=body(), headers=kind)
            assert answer.json()["bytes"] == blocks * len(BLOCK)
            got, expected = hashlib.sha256(), hashlib.sha256()
            for _ in range(blocks):
                expected.update(BLOCK)
            async with client.stream("GET", f"{url}/{answer.json()['id']}/content") as content:
                async for part in content.aiter_bytes():
                    got.update(part)
                    most = max(most, gateway.memory_info().rss)
        assert got.digest() == expected.digest()
        print(f"{blocks * len(BLOCK) / MB:.0f} MB added {(most - before) / MB:.1f} MB")  # noqa: T201
        assert most - before <= MOST_ADDED
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.wait()
