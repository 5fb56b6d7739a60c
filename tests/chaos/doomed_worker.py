"""A worker process that kills itself with SIGKILL at a chosen moment: `POINT COUNT REDIS_URL DATABASE_URL`.

The points are before and after every external effect: each script of the queue, and the SQL transaction
(before it begins, when its rows are written but not committed, after the commit).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import sqlalchemy

from api_client.scripts import Argument, Script
from tests.support.worker import settings, thread_host
from worker.app import Worker
from worker.consume.job_stream import JobStream
from worker.record.store import ResultStore

SCRIPTS = ("claim", "append", "heartbeat", "finish", "release", "resign")
POINTS = (
    *(f"{moment} {script}" for script in SCRIPTS for moment in ("before", "after")),
    "before commit",
    "inside commit",
    "after commit",
)

_countdown: dict[str, int] = {}


def point(name: str) -> None:
    """Die here if it is time."""
    if name in _countdown:
        _countdown[name] -= 1
        if _countdown[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class DoomedStream(JobStream):
    async def _call(self, script: Script, *arguments: Argument, attempts: int = 2) -> Any:
        point(f"before {script.name}")
        reply = await super()._call(script, *arguments, attempts=attempts)
        if script.name != "claim" or reply:  # an empty claim has no effect to lose
            point(f"after {script.name}")
        return reply


class DoomedStore(ResultStore):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        sqlalchemy.event.listen(self._engine, "commit", lambda _connection: point("inside commit"))

    def _commit(self, rows: list[Any]) -> Any:
        point("before commit")
        report = super()._commit(rows)
        point("after commit")
        return report


def main(name: str, count: int, redis_url: str, database: str) -> int:
    _countdown[name] = count
    chosen = settings(
        redis_url, database, worker_id="doomed", model="synthetic?step_ms=4", lease_seconds=1.0, drain_seconds=0.0,
        heartbeat_seconds=0.3,
    )  # fmt: skip
    worker = Worker(chosen, thread_host(chosen.engine_config()), stream_type=DoomedStream, store_type=DoomedStore)
    return asyncio.run(worker.serve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
