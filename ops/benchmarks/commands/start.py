"""`ops/bench start`: how long a worker takes from the start of its process to a first token.

A job waits. The worker starts with a warm page cache and compiled kernels: a first start is not
counted. The parts are those that its log names.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from datetime import datetime

from rich.console import Console

from ops.benchmarks.measure.quiet import wait_until_quiet
from ops.benchmarks.measure.tables import show
from ops.benchmarks.peers.service import TOKENMILL, MeasuredService
from tokenmill import Client
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.record import migrate

QUEUE = "start"
PARTS = {  # by the beginning of the message that ends it
    "worker process": "Engine: importing",
    "imports of the engine": "Engine: loading",
    "model": "Engine: warming up",
    "first step": "Engine ready",
    "connections": "Worker ready",
}
FIRST = "first token of the job"
COLUMNS = {"seconds": ("s", "{:.2f}"), "until": ("until", "{:.2f}")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    service = MeasuredService()
    try:
        url, database = f"unix://{service.socket}", f"sqlite:///{service.folder}/results.db"
        migrate.upgrade(database)
        settings = {
            "REDIS_URL": url, "DATABASE_URL": database, "QUEUE": QUEUE, "MODEL": arguments.model,
            "LOG_FORMAT": "json",
        }  # fmt: skip
        with Client(url, queue=QUEUE, database=database) as client:
            rounds = [_start(client, settings) for _ in range(arguments.rounds + 1)][1:]
    finally:
        service.close()
    table: dict[str, dict[str, float]] = {}
    before = 0.0
    for part in rounds[0]:
        until = statistics.median(each[part] for each in rounds)
        table[part] = {"seconds": until - before, "until": until}
        before = until
    show(Console(), arguments.model, table, COLUMNS)
    return {"results": {arguments.model: table}, "rounds": rounds}


def _start(client: Client, settings: dict[str, str]) -> dict[str, float]:
    """Return when each part ended, in seconds from the start of the process."""
    wait_until_quiet()
    job = client.submit(prompt="The sky is", max_tokens=2)
    command = [TOKENMILL, "worker"]
    variables = {f"TOKENMILL_{name}": value for name, value in settings.items()}
    with tempfile.TemporaryFile() as log:
        began = time.time()
        worker = GuardedProcess(command, env={**os.environ, **variables}, output=log)
        try:
            next(chunk for chunk in client.stream(job, timeout=600) if chunk.token_ids)
            first = time.time()
            client.result(job, timeout=60)
        finally:
            worker.end(signal.SIGTERM)
        log.seek(0)
        said = [json.loads(line) for line in log if line.startswith(b"{")]
    ends = {
        part: next(
            datetime.fromisoformat(line["time"]).timestamp() - began
            for line in said
            if line["message"].startswith(beginning)
        )
        for part, beginning in PARTS.items()
    }
    return {**ends, FIRST: first - began}
