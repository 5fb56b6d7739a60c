"""A worker of another version, as a process: `older|newer NAME REDIS_URL DATABASE_URL`, ended by
SIGTERM.

What it runs is this version's code; what it writes into the queue is what the other would: `older`
leaves out every field that a message can do without, `newer` adds fields that nobody here knows, in
every message at every depth, and in the job's hash.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgpack

from tests.support.worker import settings, thread_host
from tokenmill.transport.scripts import Argument, Script
from tokenmill_worker.app import Worker
from tokenmill_worker.consume.job_stream import JobStream
from tokenmill_worker.consume.scripts import CLAIM, HEARTBEAT
from tokenmill_worker.jobs import Delivery

LEAST = {
    "job_id",
    "index",
    "token_ids",
    "text",
    "choice",
    "finish_reason",
    "status",
    "usage",
    "error",
    "choices",
}
LEAST |= {
    "text_ends",
    "code",
    "message",
    "worker_id",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
}
FUTURE = {"future": {"deep": [1, None, "x"]}, "later": 5}


def rewritten(data: bytes, version: str) -> bytes:
    """Return a message as the other version would have packed it."""
    packed: bytes = msgpack.packb(_changed(msgpack.unpackb(data, strict_map_key=False), version))
    return packed


def _changed(node: Any, version: str, key: str = "") -> Any:
    if isinstance(node, dict) and key not in ("metadata", "logit_bias", "tenants"):
        inner = {name: _changed(value, version, name) for name, value in node.items()}
        return (
            {k: v for k, v in inner.items() if k in LEAST} if version == "older" else inner | FUTURE
        )
    return [_changed(item, version, key) for item in node] if isinstance(node, list) else node


def _as_other(value: Argument, version: str) -> Argument:
    """Messages are the arguments that begin like a map."""
    is_message = isinstance(value, bytes) and bool(value) and 0x80 <= value[0] <= 0x8F
    return rewritten(value, version) if is_message and isinstance(value, bytes) else value


def stream_type(version: str) -> type[JobStream]:
    class OtherStream(JobStream):
        async def _call(self, script: Script, *arguments: Argument, attempts: int = 2) -> Any:
            # A worker brings its own scripts, so their options are of its version too.
            own = arguments[: script in (CLAIM, HEARTBEAT)]
            others = [_as_other(value, version) for value in arguments[len(own) :]]
            return await super()._call(script, *own, *others, attempts=attempts)

        async def claim(self, credits: int, urgent: int = 0) -> list[Delivery]:
            deliveries = await super().claim(credits, urgent)
            for delivery in deliveries if version == "newer" else ():
                await self._client.hset(self.keys.job(delivery.job_id), "future", "x")
            return deliveries

    return OtherStream


def main(version: str, name: str, redis_url: str, database: str) -> int:
    chosen = settings(
        redis_url,
        database,
        worker_id=name,
        model="synthetic?step_ms=15",
        drain_seconds=0.0,
        max_num_seqs=8,
    )
    kind = JobStream if version == "same" else stream_type(version)
    return asyncio.run(
        Worker(chosen, thread_host(chosen.engine_config()), stream_type=kind).serve()
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
