"""A queue as an earlier version left it, key by key: this one goes on with what waits and with what
was running.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.schemas.recording import FOLDER
from tests.support.queue import end_of
from tokenmill_schemas.codec import decode_chunk
from tokenmill_schemas.control import WorkerStatus

pytestmark = pytest.mark.redis


async def restore(redis: Any, base: str, folder: Path) -> None:
    """`@name` stands for a recorded message."""
    kept = msgspec.json.decode((folder / "queue.json").read_bytes())

    def values(fields: dict[str, str]) -> dict[str, Any]:
        return {
            k: (folder / f"{v[1:]}.msgpack").read_bytes() if v.startswith("@") else v
            for k, v in fields.items()
        }

    for name, fields in kept["hashes"].items():
        await redis.hset(base + name, mapping=values(fields))
    for name, entries in kept["streams"].items():
        for entry, fields in entries:
            await redis.xadd(base + name, values(fields), id=entry)
        if name.startswith("jobs:"):
            await redis.xgroup_create(base + name, "workers", id="0")
    for name in kept["delivered"]:
        await redis.xreadgroup("workers", "all", {base + name: ">"})
    for name, members in kept["sets"].items():
        await redis.sadd(base + name, *members)
    for name, scores in kept["zsets"].items():
        await redis.zadd(base + name, scores)
    for name, value in kept["strings"].items():
        await redis.set(base + name, value, px=60_000)


@pytest.mark.parametrize(
    "folder", sorted(FOLDER.glob("*/queue.json")), ids=lambda path: path.parent.name
)
async def test_jobs_left_by_an_earlier_version_are_finished(queue, folder):
    await restore(queue.redis, queue.keys.base, folder.parent)
    assert [dead.error for dead in await queue.client.dead()] == ["it was not to be"]
    worker = queue.worker("now")
    # its worker's lease is gone: the job is free
    await worker.heartbeat(WorkerStatus(worker_id="now"))
    claimed = {delivery.job_id: delivery for delivery in await worker.claim(credits=5)}
    assert set(claimed) == {"waits", "ran"}
    assert claimed["ran"].token > 1_700_000_000_500
    assert [decode_chunk(chunk).index for chunk in claimed["ran"].log] == [0]
    assert {delivery.outcome for delivery in claimed.values()} == {"run"}
    assert await worker.finish([end_of(delivery, 2) for delivery in claimed.values()]) == [
        True,
        True,
    ]
    depth = await queue.client.depth()
    assert (depth.num_queued, depth.running) == (0, 0)
    assert (await queue.client.result("ran", timeout=30)).status.value == "succeeded"
