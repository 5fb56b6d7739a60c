"""The service that the clients use: a Valkey, SQLite, a bucket of files, a worker with the built-in
model under a template that has tools, the periodic tasks, and a gateway that wants a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from ops.gateway_check.environments import environment
from tests.gateway.conftest import new_key, running_gateway
from tests.support.valkey import ControlledValkey
from tests.support.worker import QUEUE, database_url, running_worker
from tests.text.chat.families import HERMES
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import free_port

MODEL = "smollm2-135m-instruct"
BUCKET_SERVER = ("moto[server]==5.2.5",)
TEMPLATE = "{{ (tools or []) | tojson }}\n" + HERMES


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    key: str


@contextlib.asynccontextmanager
async def running_service() -> AsyncIterator[Serving]:
    """Run the service inside the block."""
    with (
        tempfile.TemporaryDirectory() as name,
        ControlledValkey(Path(name) / "valkey", persistent=False) as server,
    ):
        folder = Path(name)
        template = folder / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        database = database_url(folder)
        async with (
            running_bucket() as files,
            running_worker(
                server.url, database, in_process=True, lease_seconds=30.0, model=MODEL,
                chat_template=str(template), tool_format="hermes", max_memory_gib=0.7,
            ),
            running_tasks(server.url, database, files),
            running_gateway(
                server.url, database, is_open=False, files=files, models={MODEL: QUEUE},
                answer_s=600.0,
            ) as gateway,
        ):  # fmt: skip
            yield Serving(gateway.url, new_key(database, "acme"))


@contextlib.asynccontextmanager
async def running_bucket() -> AsyncIterator[str]:
    """Run a server of S3 inside the block; yield the URL of files in its bucket."""
    port = free_port()
    moto = environment("moto", BUCKET_SERVER) / "bin" / "moto_server"
    process = GuardedProcess([str(moto), "-p", str(port)])
    endpoint = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
    }  # fmt: skip
    try:
        async with httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    (await client.put(f"{endpoint}/bucket")).raise_for_status()
                    break
                await asyncio.sleep(0.1)
        yield "s3://bucket/gateway"
    finally:
        process.end(signal.SIGTERM)


@contextlib.asynccontextmanager
async def running_tasks(redis_url: str, database: str, files: str) -> AsyncIterator[None]:
    """Run `tokenmill tasks`, which runs the batches, inside the block."""
    variables = {
        "TOKENMILL_REDIS_URL": redis_url,
        "TOKENMILL_DATABASE_URL": database,
        "TOKENMILL_FILES": files,
    }
    program = str(Path(sys.executable).parent / "tokenmill")
    process = await asyncio.create_subprocess_exec(program, "tasks", env=os.environ | variables)
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
