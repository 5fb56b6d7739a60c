"""`ops/bench simulate`: counts how many workers one queue server carries at most, and tries a day
of scaling (`scaling_day`). With `--fleet`: a day of a fixed fleet (`fleet_day`), with and without
sessions and grouped files.

The costs of our scripts on the server's thread were measured once; the workers follow from a cost
model of their device, an H200 with Llama-3-8B. An unhurried server gets a call for each step and
each job. A full one gets calls as large as the product makes them: tokens that wait share chunks,
and jobs are claimed and finished in groups. Waiting times are not counted, so a server carries
somewhat fewer workers.
"""

import argparse
import random
import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ops.benchmarks.measure import fleet_day, scaling_day
from ops.benchmarks.measure.step_floor import SHAPES, Ceilings, Work
from ops.benchmarks.measure.tables import show
from tokenmill_worker.publish.chunker import CHECKPOINT_TOKENS, MOST_TOGETHER
from tokenmill_worker.publish.publisher import EVENTS_AT_ONCE
from tokenmill_worker.queue.consumer import MAX_AT_ONCE
from tokenmill_worker.record.finalizer import FinalizerLimits

COLUMNS = {
    "unhurried": ("server's thread\na worker", "{:.1%}"),
    "full": ("… with\nfull calls", "{:.1%}"),
    "workers": ("workers\nat most", "{:.0f}"),
    "goodput": ("good\njobs", "{:.1%}"),
    "hours": ("hours,\n× ideal", "{:.2f}"),
    "most": ("workers\nat most", "{:.0f}"),
    "turns": ("turns", "{:.0f}"),
}
FLEET = {
    "goodput": ("good\njobs", "{:.1%}"),
    "first_p50": ("first token\ns p50", "{:.2f}"),
    "first_p99": ("\np99", "{:.1f}"),
    "heavy_p99": ("p99, of the\nhalf's tenant", "{:.1f}"),
    "hits": ("chats'\nhits", "{:.1%}"),
    "line_hits": ("lines'\nhits", "{:.1%}"),
    "computing": ("prompts' share\nof the workers", "{:.1%}"),
    "largest": ("server, peak\nlargest queue", "{:.1%}"),
    "server": ("\nall", "{:.1%}"),
}
SHAPE = SHAPES["llama-3-8b"]
# what good kernels reach of the data sheet's peaks
SUSTAINED = Ceilings(bytes_s=0.85 * 4.8e12, operations_s=0.65 * 989e12)
OVERHEAD_S = 0.0008  # launch, sampling and copies of a step
MAX_ANSWER = 1_000  # tokens
RECORD_GROUP = FinalizerLimits().max_group


@dataclass(frozen=True, slots=True)
class ScriptCosts:
    """Seconds of the server's main thread per call and per item of a call.

    Measured on two cores of a Xeon with AMX (lscpu: model 167 of family 6), Valkey 9.1.2,
    append-only file on: the least of 45 rounds, with reading, sending and writing the log to disk.
    """

    append: float = 21.2e-6
    chunk: float = 3.1e-6  # of one token, while the worker's ownership version is valid
    token: float = 0.086e-6  # each further one of a chunk
    opened: float = 10.6e-6  # first chunk of a job: the job is looked up, and its log begun
    checkpoint: float = 3.7e-6  # a chunk that is logged and not published
    claim: float = 115.7e-6
    claimed: float = 25.4e-6
    finish: float = 69.2e-6
    finished: float = 21.0e-6
    submit: float = 69.7e-6


@dataclass(frozen=True, slots=True)
class Mix:
    """Jobs whose decodes read `context` tokens of keys and values a step on average."""

    prompt_tokens: int
    context: int
    num_sequences: int = 256


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers in chunks of `tokens` tokens; those of bulk jobs are logged and not published."""

    tokens: int = 1
    is_published: bool = True


MIXES = {"short prompts": Mix(64, 220), "long prompts": Mix(1_350, 1_500)}
ANSWERS = {
    "a chunk per token": Answers(),  # stream: true
    "chunks of 8": Answers(8),  # chunk_tokens = 8
    "checkpoints": Answers(CHECKPOINT_TOKENS, is_published=False),  # stream: false
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fleet", action="store_true", help="only the day of a fixed fleet")
    parser.add_argument("--jobs", type=int, default=10_000_000, help="of the fleet")
    parser.add_argument("--workers", type=int, default=256, help="of the fleet")
    parser.add_argument("--queues", type=int, default=10, help="of the fleet")


def run(options: argparse.Namespace) -> dict[str, Any]:
    costs = ScriptCosts()
    if options.fleet:
        days = fleet_day.measure(options.jobs, options.workers, options.queues, costs)
        title = f"A day of {options.queues} queues, {options.workers} workers"
        show(Console(width=120), title, days, FLEET)
        return {"results": {title: days}}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, mix in MIXES.items():
        table: dict[str, dict[str, float]] = {}
        for kind, answers in ANSWERS.items():
            each, full = (server_s(mix, answers, costs, is_full=full) for full in (False, True))
            table[kind] = {"unhurried": each, "full": full, "workers": 1 // full}
        results[f"One queue server, {name}, {tokens_s(mix):,.0f} tok/s a worker"] = table
    results["A day of one queue, workers by tokenmill:queue_workers_wanted"] = {
        **{f"people and files, day {seed}": scaling_day.measure(seed) for seed in range(3)},
        "people alone": scaling_day.measure(files=False),
        "files alone": scaling_day.measure(people=False),
    }
    for title, cases in results.items():
        show(Console(), title, cases, COLUMNS)
    return {"results": results}


def mean_answer() -> float:
    """Return the mean length of an answer: log-normal, with the median published for a large
    conversation service.
    """
    draw = random.Random("answers").lognormvariate
    return statistics.fmean(
        max(4, min(MAX_ANSWER, round(129 * draw(0.0, 0.9)))) for _ in range(20_000)
    )


def step_s(tokens: int, sampled: int, read: int, pairs: int) -> float:
    """Return the seconds of a step; the arguments are those of Work."""
    return OVERHEAD_S + SHAPE.floor_s(SUSTAINED, Work(tokens, sampled, read, pairs))


def tokens_s(mix: Mix) -> float:
    """Return the tokens per second of one device whose places are all taken.

    Each step has a decode of every sequence, and prompts for as many sequences as end in it.
    """
    decodes, new = mix.num_sequences, mix.prompt_tokens * mix.num_sequences / mean_answer()
    read = decodes * mix.context
    pairs = read + new * mix.prompt_tokens / 2
    return decodes / step_s(round(decodes + new), decodes, round(read + new), round(pairs))


def server_s(mix: Mix, answers: Answers, costs: ScriptCosts, *, is_full: bool) -> float:
    """Return the seconds of the server's thread that one worker takes per second."""
    tokens = tokens_s(mix)
    claimed, finished, appended, size = 1, 1, mix.num_sequences, answers.tokens  # a call
    if is_full:
        claimed, finished = MAX_AT_ONCE, RECORD_GROUP
        appended = max(EVENTS_AT_ONCE, mix.num_sequences)
        size = max(size, MOST_TOGETHER) if answers.is_published else size
    chunk_s = costs.chunk + (size - 1) * costs.token if answers.is_published else costs.checkpoint
    job_s = costs.submit + costs.claimed + costs.opened + costs.finished
    job_s += costs.claim / claimed + costs.finish / finished
    return tokens / mean_answer() * job_s + tokens * (costs.append / appended + chunk_s / size)
