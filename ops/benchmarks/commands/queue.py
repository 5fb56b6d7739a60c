"""`ops/bench queue`: measures the queue alone, with a model-free engine, beside Celery and arq.

Each system gets a fresh Valkey and one worker process. Measured are jobs per second, submitted one
by one and many at once, memory per waiting job, and the whole service (submit, run, publish every
token, read every result) with the server's commands per job. For our queue, the waiting times of a
token and of a job are measured too. Rounds alternate; figures are medians.
"""

import argparse
from collections import defaultdict
from typing import Any

from rich.console import Console

from ops.benchmarks.measure.figures import medians
from ops.benchmarks.measure.tables import show
from ops.benchmarks.peers.environments import ROOT
from ops.benchmarks.queue.systems import measure, systems

SHOWN = {
    "submit_one_jobs_s": "handed in one by one, jobs/s",
    "submit_many_jobs_s": "handed in together, jobs/s",
    "bytes_per_job": "memory per waiting job, bytes",
    "jobs_s": "the whole way, jobs/s",
    "tokens_s": "tokens published and recorded, 1/s",
    "commands_per_job": "server commands per job, those in scripts too",
    "submit_p50_ms": "submit to engine (idle worker), ms p50",
    "submit_p99_ms": "submit to engine, ms p99",
    "start_p50_ms": "submit to first token (a step: 20 ms), ms p50",
    "start_p99_ms": "submit to first token, ms p99",
    "latency_p50_ms": "engine to subscriber (32 streams), ms p50",
    "latency_p99_ms": "engine to subscriber, ms p99",
    "script_ms": "… a script in the server, ms mean",
    "chunks_s": "chunks to subscribers, 1/s",
    "calls_per_step": "scripts per engine step (32 streams)",
    "scripts_per_job": "scripts per job (32 streams)",
    "cpu_worker_us": "CPU per chunk: worker's I/O process, µs",
    "cpu_server_us": "CPU per chunk: Valkey, µs",
    "cpu_subscribers_us": "CPU per chunk: 32 subscribers in one process, µs",
}
LOG = ROOT / ".cache" / "bench-queue.log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer", action="append", default=[], choices=("celery", "arq"), help="repeatable"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    console = Console(stderr=True)
    names = ["tokenmill", *dict.fromkeys(options.peer)]
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("wb") as log, console.status("") as status:
        kinds = systems(log, status.update)
        for number in range(options.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                status.update(f"round {number + 1} of {options.rounds}: {name}")
                rounds[name].append(measure(kinds[name](), options.jobs, options.tokens))
    results = {name: medians(rounds[name]) for name in names}
    title = f"{options.jobs} jobs of {options.tokens} tokens, one worker; medians of rounds"
    show(Console(), title, results, {key: (words, "") for key, words in SHOWN.items()}, turned=True)
    return {"results": {"queue": results}, "rounds": {"queue": rounds}}
