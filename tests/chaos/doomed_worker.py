"""A worker process that kills itself with SIGKILL at a chosen moment.

The points are before and after every external effect: each script of the queue, by what it is
called for, the queue's limits, and the SQL transaction (before it begins, when its rows are written
but not committed, after the commit).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

import sqlalchemy

from tests.support.worker import PatientStream, settings, thread_host
from tokenmill.transport.scripts import Argument, Script
from tokenmill_worker.app import Worker
from tokenmill_worker.queue import scripts
from tokenmill_worker.record.result_store import ResultStore

# Workers are forked from a process that has imported what they need, which takes longer than they
# live.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [__name__, "tokenmill_worker.engines.own.execution.build", "xgrammar"]
)

# Why a job is given back, and how a finish sets one aside: other effects of the same scripts.
REASONS = ("hand-over", "suspects", "retry")
EFFECTS = ("orphan", "claim", "append", "heartbeat", "finish", "dead letter", *REASONS, "resign")
POINTS = (
    *(f"{moment} {effect}" for effect in EFFECTS for moment in ("before", "after")),
    "after limits",
    "before commit",
    "inside commit",
    "after commit",
)
NEEDS_ENGINE_PROCESS = ("suspects", "dead letter")  # for its engine has to die
# it is asked to end while it owns jobs, which take longer then
NEEDS_DRAIN = ("hand-over", "resign")

_REASON_OF = {
    "handover": "hand-over",
    "crash": "suspects",
    "solo_crash": "suspects",
    "retry": "retry",
}
_countdown: dict[str, int] = {}


def die_at(name: str, count: int) -> None:
    """Die at the `count`-th time that the process comes to this point."""
    _countdown[name] = count


def calls_left(name: str) -> int:
    """Return at which further call of this point the process dies."""
    return _countdown[name]


def point(name: str) -> None:
    """Die here if it is time."""
    if name in _countdown:
        _countdown[name] -= 1
        if _countdown[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def effect_of(script: Script, arguments: tuple[Argument, ...]) -> str:
    """Return the purpose of this script call in the words of the table of kill points."""
    if script is scripts.RELEASE:
        return _REASON_OF[str(arguments[3])]
    if script is scripts.RESIGN:
        return "orphan" if arguments[1] == "orphan" else "resign"
    if script is scripts.FINISH and "dead" in arguments:
        return "dead letter"
    return script.name


class DoomedStream(PatientStream):
    async def open(self) -> None:
        await super().open()
        point("after limits")

    async def _call(self, script: Script, *arguments: Argument, attempts: int = 2) -> Any:
        effect = effect_of(script, arguments)
        point(f"before {effect}")
        reply = await super()._call(script, *arguments, attempts=attempts)
        if effect != "claim" or reply:  # an empty claim has no effect to lose
            point(f"after {effect}")
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


def start(main: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """Start a worker, by this module's `main` or another, in a process of its own."""
    process = _FORKS.Process(target=main, args=arguments, daemon=True)
    process.start()
    return process


def main(name: str, count: int, redis_url: str, database: str) -> None:
    die_at(name, count)
    in_process = name.endswith(NEEDS_ENGINE_PROCESS)
    model = f"synthetic?step_ms={50 if name.endswith(NEEDS_DRAIN) else 4}"
    chosen = settings(
        redis_url, database, worker_id="doomed", model=model, lease_seconds=1.0, drain_seconds=0.0,
        queue_limit=1_000, max_num_seqs=4,
        max_crashes=1 if in_process else 3,
    )  # fmt: skip
    host = None if in_process else thread_host(chosen.engine_config())
    asyncio.run(Worker(chosen, host, stream_type=DoomedStream, store_type=DoomedStore).serve())
