"""A worker of the next version, as a process: `NAME REDIS_URL DATABASE_URL`, ended by SIGTERM.

It runs this version's code, and adds fields that nobody here knows to all that it writes into the
queue: to every message at every depth, and to the job's hash. A worker named "same" adds none.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgpack

from tests.support.worker import settings, thread_host
from tokenmill.transport.scripts import Argument, Script
from tokenmill_worker.app import Worker
from tokenmill_worker.jobs import Delivery
from tokenmill_worker.queue.job_stream import JobStream
from tokenmill_worker.queue.scripts import CLAIM, HEARTBEAT

FUTURE = {"future": {"deep": [1, None, "x"]}, "later": 5}


def rewritten(data: bytes) -> bytes:
    """Return a message as the next version would have packed it."""
    packed: bytes = msgpack.packb(_grown(msgpack.unpackb(data, strict_map_key=False)))
    return packed


def _grown(node: Any, key: str = "") -> Any:
    if isinstance(node, dict) and key not in ("metadata", "logit_bias", "tenants"):
        return {name: _grown(value, name) for name, value in node.items()} | FUTURE
    return [_grown(item, key) for item in node] if isinstance(node, list) else node


def _as_next(value: Argument) -> Argument:
    """Messages are the arguments that begin like a map."""
    is_message = isinstance(value, bytes) and bool(value) and 0x80 <= value[0] <= 0x8F
    return rewritten(value) if is_message and isinstance(value, bytes) else value


class NextStream(JobStream):
    async def _call(self, script: Script, *arguments: Argument, attempts: int = 2) -> Any:
        # A worker brings its own scripts, so their options are of its version too.
        own = arguments[: script in (CLAIM, HEARTBEAT)]
        others = [_as_next(value) for value in arguments[len(own) :]]
        return await super()._call(script, *own, *others, attempts=attempts)

    async def claim(self, credits: int, urgent: int = 0) -> list[Delivery]:
        deliveries = await super().claim(credits, urgent)
        for delivery in deliveries:
            await self._client.hset(self.keys.job(delivery.job_id), "future", "x")
        return deliveries


def main(name: str, redis_url: str, database: str) -> int:
    chosen = settings(
        redis_url,
        database,
        worker_id=name,
        model="synthetic?step_ms=15",
        drain_seconds=0.0,
        max_num_seqs=8,
    )
    kind = JobStream if name == "same" else NextStream
    return asyncio.run(
        Worker(chosen, thread_host(chosen.engine_config()), stream_type=kind).serve()
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
