"""Run as a process of its own: finishes ten jobs and dies by SIGKILL at the named moment.

    python -m tests.record.killed URL ACKNOWLEDGED_FILE MOMENT

Moments: before-commit, after-commit, after-acknowledge, never.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.record.support import finished
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record import Finalizer, RecordReport, ResultStore


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Store(ResultStore):
    moment = ""

    async def record(self, finished: Sequence[FinishedJob]) -> RecordReport:
        if self.moment == "before-commit":
            _die()
        report = await super().record(finished)
        if self.moment == "after-commit":
            _die()
        return report


class Acknowledgements:
    """A file with a line per acknowledged job, as Redis would keep it."""

    def __init__(self, path: Path, moment: str) -> None:
        self._path = path
        self._moment = moment

    async def finish(self, jobs: list[FinishedJob]) -> list[bool]:
        with self._path.open("a") as file:
            file.writelines(f"{job.result.job_id}\n" for job in jobs)
        if self._moment == "after-acknowledge":
            _die()
        return [True] * len(jobs)


async def main(url: str, path: str, moment: str) -> None:
    store = Store(url, queue="q")
    store.moment = moment
    finalizer = Finalizer(store, Acknowledgements(Path(path), moment))
    task = asyncio.create_task(finalizer.run())
    for number in range(10):
        await finalizer.submit(finished(f"job-{number}"))
    await finalizer.drain(30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await store.close()
    sys.exit(1 if finalizer.held_ids else 0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
