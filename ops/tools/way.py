"""Lists the files that one job passes through between `Client.submit` and its row in SQL.

    python -m ops.tools.way         # on a private server, with a worker of the model-free engine

A file counts if one of its functions runs in the producer, the worker or the engine's process from
the call of submit until the job is recorded and acknowledged. The job is a prompt of two words, the
second job of these processes, so that nothing that is only started counts. Observers do not count:
telemetry, and what it calls. Neither do the Lua scripts and what the device computes.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tokenmill import Client
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.local.valkey_server import ValkeyServer

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES = 80
PRODUCTS = ("api_client", "migrations", "schemas", "worker")
OBSERVERS = ("/telemetry/", "/operations/tracing.py")
FLAG = "WAY_FLAG"
QUEUE = "way"
LIMIT_S = 120.0
# Python runs a module of this name at the start of each process that finds it on its path.
HOOK = f"import os\nif {FLAG!r} in os.environ:\n    from ops.tools.way import trace\n    trace()\n"
PRODUCER = """
import sys
from tokenmill import Client
with Client(sys.argv[1], queue=sys.argv[2]) as client:
    for prompt in sys.stdin:
        print(client.submit(prompt=prompt, max_tokens=8), flush=True)
"""


def trace() -> None:
    """Write to a file of this process each product file in which a function runs while the flag is
    set.
    """
    name = Path(os.environ[FLAG])
    with name.open("r+b") as file:
        flag = mmap.mmap(file.fileno(), 1)
    found = name.with_suffix(f".{os.getpid()}").open("w", buffering=1)
    roots = tuple(f"{ROOT / product}/" for product in PRODUCTS)
    seen: set[object] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not flag[0] or code in seen or code.co_name == "<module>":
            return
        if code.co_filename.startswith(roots) and not _is_observer(frame):
            seen.add(code)
            found.write(f"{code.co_filename}\n")

    threading.setprofile(profile)
    sys.setprofile(profile)


def _is_observer(frame: FrameType | None) -> bool:
    """Return whether the function is an observer's, or is called by one."""
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in OBSERVERS):
            return True
        frame = frame.f_back
    return False


def measure(redis_url: str, database_url: str) -> list[Path]:
    """Run a worker and two jobs; return the files of the second job's way, relative to the root.

    The database must be migrated.
    """
    options = {
        "redis-url": redis_url, "database-url": database_url, "queue": QUEUE,
        "model": "synthetic",
        "lease-seconds": 60,  # no heartbeat while the job runs
    }  # fmt: skip
    flags = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    start = "from tokenmill.cli import main; main()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryDirectory(prefix="tokenmill-way-") as folder, ExitStack() as undo:
        name = Path(folder) / "flag"
        name.write_bytes(b"\0")
        with name.open("r+b") as file:
            flag = mmap.mmap(file.fileno(), 1)
        (Path(folder) / "sitecustomize.py").write_text(HOOK)
        environment = os.environ | {FLAG: str(name), "PYTHONPATH": f"{folder}:{ROOT}"}

        def python(*arguments: str, **pipes: Any) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", *arguments]
            process = undo.enter_context(subprocess.Popen(command, env=environment, **pipes))
            undo.callback(process.terminate)
            return process

        worker = python(start, "worker", *flags)
        producer = python(PRODUCER, redis_url, QUEUE, **pipes)
        client = undo.enter_context(Client(redis_url, queue=QUEUE))
        _wait_for(lambda: bool(client.workers()), worker)
        _run_job("Warm up", producer, client, worker)
        flag[0] = 1
        _run_job("Hello world", producer, client, worker)
        flag[0] = 0
        found = {
            line for path in name.parent.glob("flag.*") for line in path.read_text().splitlines()
        }
    return sorted(Path(line).relative_to(ROOT) for line in found)


def _run_job(
    prompt: str, producer: subprocess.Popen[str], client: Client, worker: subprocess.Popen[str]
) -> None:
    assert producer.stdin
    assert producer.stdout
    producer.stdin.write(f"{prompt}\n")
    producer.stdin.flush()
    job = producer.stdout.readline().strip()
    _wait_for(lambda: client.status(job).status is JobStatus.SUCCEEDED, worker)


def _wait_for(condition: Callable[[], bool], worker: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if worker.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the job did not end: see the worker's log above")
        time.sleep(0.02)


def main() -> None:
    with private_service() as (redis_url, database_url):
        files = measure(redis_url, database_url)
    lines = {path: (ROOT / path).read_text("utf-8").count("\n") for path in files}
    for path, num_lines in lines.items():
        print(f"{num_lines:5}  {path}")
    print(f"{sum(lines.values()):5}  in {len(files)} files, {MAX_FILES} at most")


@contextmanager
def private_service() -> Iterator[tuple[str, str]]:
    """Yield the URLs of a private server and of a migrated database."""
    from tokenmill_worker.record import migrate

    with tempfile.TemporaryDirectory(prefix="tokenmill-way-") as folder, ValkeyServer() as server:
        database_url = f"sqlite:///{folder}/way.db"
        migrate.upgrade(database_url)
        yield server.url, database_url


if __name__ == "__main__":
    main()
