"""`vllm serve` behind a queue, over HTTP, by a plain worker loop or by Celery, as measured engines.

The worker is that of `bridge_worker`. One connection subscribes to the tokens of all jobs; nothing
is stored but the last answer, so this is less work than our service does.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import httpx
from redis.asyncio import Redis

from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.workloads import WorkloadRequest
from ops.benchmarks.peers.service import MeasuredService, ReceivedTokens
from tokenmill_worker.local.valkey_server import free_port

WORKER = "ops.benchmarks.peers.bridge_worker"


class Bridge(MeasuredService):
    def __init__(self, options: EngineOptions) -> None:
        super().__init__()
        self.parts = ["worker", "server"]
        port, python = free_port(), str(options.settings["python"])
        self._health = f"http://127.0.0.1:{port}/health"
        os.environ |= {
            "BRIDGE_SOCKET": str(self.socket),
            "BRIDGE_PORT": str(port),
            "BRIDGE_PLACES": str(options.max_sequences),
        }
        self._worker: Any = import_module(WORKER)  # only now it can connect
        server = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model,
            "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port),
            "--dtype", options.dtype, "--enforce-eager", "--max-model-len", "2048",
            "--max-num-seqs", str(options.max_sequences),
            "--max-num-batched-tokens", str(options.max_batch_tokens),
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        self._is_celery = options.settings["front"] == "celery"
        loop = [sys.executable, "-m", WORKER]
        celery = [
            sys.executable, "-m", "celery", "-A", WORKER, "worker", "--pool", "threads",
            "--concurrency", str(options.max_sequences), "--loglevel", "warning",
        ]  # fmt: skip
        self.start({"server": server, "worker": celery if self._is_celery else loop}, os.environ)
        front = "Celery, threads, late acknowledgement" if self._is_celery else "a loop of threads"
        self.description = f"Valkey (append-only), {front}, vllm serve over HTTP"

    async def is_ready(self) -> bool:
        async with httpx.AsyncClient() as client:
            try:
                is_up = (await client.get(self._health)).is_success
            except httpx.TransportError:
                return False
        return is_up and (not self._is_celery or bool(self._worker.app.control.ping(timeout=0.5)))

    async def serve(
        self, requests: Sequence[WorkloadRequest], received: Sequence[ReceivedTokens], tenant: str
    ) -> None:
        jobs = [
            [f"{tenant}-{number}", list(request.prompt), request.max_tokens, tenant]
            for number, request in enumerate(requests)
        ]
        unfinished = {str(job[0]): each for job, each in zip(jobs, received, strict=True)}
        async with (
            Redis(unix_socket_path=str(self.socket), socket_timeout=None) as redis,
            redis.pubsub(ignore_subscribe_messages=True) as channel,
        ):
            await channel.subscribe(self._worker.TOKENS)
            if self._is_celery:
                send = self._worker.generate.delay
                await asyncio.to_thread(lambda: [send(*job) for job in jobs])
            else:
                await redis.rpush(self._worker.WAITING, *map(json.dumps, jobs))
            async for message in channel.listen():
                job, index, ids = json.loads(message["data"])
                if job in unfinished:  # it may be one of an earlier round that runs again
                    unfinished[job].take(index, ids)
                    if not ids:
                        del unfinished[job]
                if not unfinished:
                    return
