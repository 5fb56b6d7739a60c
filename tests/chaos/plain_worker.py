"""A worker process as in production: `NAME REDIS_URL DATABASE_URL [NAME=VALUE…]`.

The arguments after the addresses are settings. `in_process=True` gives the engine a process of its
own; otherwise it runs in a thread, which starts quicker. With `patient=True` jobs are redelivered
however often their workers vanish. The worker prints "listening" once it handles signals, and
"ready" when its engine is ready. SIGUSR1 prints what every task and thread does, and which jobs
the worker counts where.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from typing import Any

from tests.support.worker import PatientStream, settings, thread_host
from tokenmill_worker.app import Worker
from tokenmill_worker.contract.host import EngineDied
from tokenmill_worker.queue.job_stream import JobStream
from tokenmill_worker.telemetry import configure_logging

LISTENING, READY = "[listening]", "[ready]"


def main(name: str, redis_url: str, database: str, *changes: str) -> int:
    values = dict(change.split("=", 1) for change in changes)
    in_process = values.pop("in_process", "False") == "True"
    stream_type = PatientStream if values.pop("patient", "False") == "True" else JobStream
    chosen = settings(redis_url, database, worker_id=name, **values)
    configure_logging(chosen.log_level, chosen.log_format, with_private=chosen.log_prompts)
    host = None if in_process else thread_host(chosen.engine_config())
    return asyncio.run(serve(Worker(chosen, host, stream_type=stream_type)))


async def serve(worker: Worker) -> int:
    def print_stacks() -> None:
        faulthandler.dump_traceback()
        for task in asyncio.all_tasks():
            print_chain(task)
        print(accounts(worker), file=sys.stderr, flush=True)  # noqa: T201

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print_stacks)
    serving = asyncio.create_task(worker.serve())
    await asyncio.sleep(0)  # it takes its signals first
    print(LISTENING, flush=True)  # noqa: T201
    ready = asyncio.create_task(worker.ready.wait())
    await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        print(READY, flush=True)  # noqa: T201
    ready.cancel()
    try:
        return await serving
    # killed before it was ready: the command says so in a sentence, and starts again
    except EngineDied as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1


def accounts(worker: Worker) -> str:
    """Say which jobs the worker counts where, and what it would claim."""
    service = worker.service
    owned, host = service._owned, service.supervisor.host
    return (
        f"owns {len(owned)}: {len(owned.in_engine)} in the engine, {len(owned.preparing)} in "
        f"preparation, {len(service._quarantine)} held; {service.credits()}, "
        f"{service.health}, {host and host.capacity}"
    )


def print_chain(task: asyncio.Task[Any]) -> None:
    """Print where a task waits: each coroutine, and the one that it awaits."""
    print(task.get_name(), file=sys.stderr)  # noqa: T201
    part: Any = task.get_coro()
    while part is not None:
        frame = getattr(part, "cr_frame", None) or getattr(part, "gi_frame", None)
        if frame is not None:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            print(f"  {place} in {frame.f_code.co_qualname}", file=sys.stderr)  # noqa: T201
        part = getattr(part, "cr_await", None) or getattr(part, "gi_yieldfrom", None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
