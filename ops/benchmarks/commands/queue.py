"""`ops/bench queue`: measures the queue alone, with a model-free engine, beside Celery and arq.

Each system gets a fresh Valkey and one worker process. Measured are jobs per second, submitted one
by one and many at once, memory per waiting job, and the whole way (submit, run, publish every
token, read every result) with the server's commands per job. Rounds alternate; figures are medians.
"""

import argparse
from typing import Any

from rich.console import Console

from ops.benchmarks.measure.figures import alternate, medians
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
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("wb") as log, console.status("") as status:
        kinds = systems(log, status.update)

        def measure_one(name: str, number: int) -> dict[str, float]:
            status.update(f"round {number + 1} of {options.rounds}: {name}")
            return measure(kinds[name](), options.jobs, options.tokens)

        rounds = alternate(names, options.rounds, measure_one)
    results = {name: medians(done) for name, done in rounds.items()}
    title = f"{options.jobs} jobs of {options.tokens} tokens, one worker; medians of rounds"
    show(Console(), title, results, {key: (words, "") for key, words in SHOWN.items()}, turned=True)
    return {"results": {"queue": results}, "rounds": {"queue": rounds}}
