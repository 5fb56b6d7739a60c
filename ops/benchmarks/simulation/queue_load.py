"""Counts how busy one queue server is under many workers, and how many it carries at most.

The costs of the scripts were measured once. An unhurried server gets a call for each step and each
job. A full one gets calls as large as the product makes them: tokens that wait share chunks, and
jobs are claimed and finished in groups. Waiting times are not counted, so a server carries somewhat
fewer workers.
"""

import random
import statistics
from dataclasses import dataclass

from ops.benchmarks.simulation.costs import seconds
from tokenmill_worker.publish.chunker import CHECKPOINT_TOKENS, MOST_TOGETHER
from tokenmill_worker.publish.publisher import EVENTS_AT_ONCE
from tokenmill_worker.queue.consumer import MAX_AT_ONCE
from tokenmill_worker.record.finalizer import FinalizerLimits

MAX_ANSWER = 1_000  # tokens
RECORD_GROUP = FinalizerLimits().max_group


@dataclass(frozen=True, slots=True)
class ScriptCosts:
    """Seconds of the server's main thread per call and per item of a call.

    Measured on two cores of a Xeon with AMX (lscpu: model 167 of family 6), Valkey 9.1.2,
    append-only file on: the least of 45 rounds, with reading, sending and writing the log to disk.

    Args:
        chunk: per chunk of one token, while the worker's ownership version is valid.
        token: per further token of a chunk.
        opened: per first chunk of a job, for which the job is looked up and its log begun.
        checkpoint: per chunk that is logged and not published.
    """

    append: float = 21.2e-6
    chunk: float = 3.1e-6
    token: float = 0.086e-6
    opened: float = 10.6e-6
    checkpoint: float = 3.7e-6
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


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Return figures by mix of jobs and kind of answers."""
    costs = ScriptCosts()
    return {
        f"One queue server, {name}, {tokens_s(mix):,.0f} tok/s a worker": {
            kind: {
                "unhurried": server_s(mix, answers, costs, is_full=False),
                "full": (full := server_s(mix, answers, costs, is_full=True)),
                "workers": 1 // full,
            }
            for kind, answers in ANSWERS.items()
        }
        for name, mix in MIXES.items()
    }


def mean_answer() -> float:
    """Return the mean length of an answer: log-normal, with the median published for a large
    conversation service.
    """
    draw = random.Random("answers").lognormvariate
    return statistics.fmean(
        max(4, min(MAX_ANSWER, round(129 * draw(0.0, 0.9)))) for _ in range(20_000)
    )


def tokens_s(mix: Mix) -> float:
    """Return the tokens per second of one device whose places are all taken.

    Each step has a decode of every sequence, and prompts for as many sequences as end in it.
    """
    decodes, new = mix.num_sequences, mix.prompt_tokens * mix.num_sequences / mean_answer()
    read = decodes * mix.context
    pairs = read + new * mix.prompt_tokens / 2
    return decodes / seconds(round(decodes + new), decodes, round(read + new), round(pairs))


def server_s(mix: Mix, answers: Answers, costs: ScriptCosts, *, is_full: bool) -> float:
    """Return the seconds of the server's thread that one worker takes per second."""
    tokens = tokens_s(mix)
    jobs = tokens / mean_answer()
    claimed_at_once, finished_at_once, appended_at_once = (
        (MAX_AT_ONCE, RECORD_GROUP, max(EVENTS_AT_ONCE, mix.num_sequences))
        if is_full
        else (1, 1, mix.num_sequences)
    )
    job_s = (
        costs.submit
        + costs.claim / claimed_at_once
        + costs.claimed
        + costs.opened
        + costs.finish / finished_at_once
        + costs.finished
    )
    if answers.is_published:
        size = max(answers.tokens, MOST_TOGETHER) if is_full else answers.tokens
        chunk_s = costs.chunk + (size - 1) * costs.token
    else:
        size, chunk_s = answers.tokens, costs.checkpoint
    return jobs * job_s + tokens * (costs.append / appended_at_once + chunk_s / size)
