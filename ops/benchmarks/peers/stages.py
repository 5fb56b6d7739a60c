"""Splits a token's time from the engine's step to its subscriber into stages.

    step's end ──frame──▶ I/O process ──chunk──▶ append called ──server──▶ subscriber's connection
    ──told──▶ its task

The worker and the subscribers note times, for one job in several. All processes of a benchmark are
on one machine and read one monotonic clock. A noted job has NOTED_SEED as its seed, which greedy
sampling ignores.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.benchmarks.measure.figures import STAGES
from tokenmill import AsyncClient
from tokenmill.transport.async_pubsub import MultiplexedSubscription, PubSubMultiplexer
from tokenmill_schemas.codec import decode_chunk

Passage = dict[int, float]  # number of tokens so far → time
NOTED_SEED = 4711


@dataclass(slots=True)
class Notes:
    """Times that the worker wrote: the sequences of each step by its end, other times by job."""

    steps: dict[float, int] = field(default_factory=dict)
    num_tokens: int = 0  # tokens of all jobs
    submits: dict[str, float] = field(default_factory=dict)
    ends: dict[str, Passage] = field(default_factory=lambda: defaultdict(dict))
    frames: dict[str, Passage] = field(default_factory=lambda: defaultdict(dict))
    appends: dict[str, Passage] = field(default_factory=lambda: defaultdict(dict))

    @classmethod
    def read(cls, path: Path, offset: int) -> "Notes":
        """Read the lines from byte `offset` on; the first time of an event counts."""
        notes = cls()
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read().decode("ascii")
        for line in text.splitlines():
            match line.split(" "):
                case ["submit", when, job]:
                    notes.submits.setdefault(job, float(when))
                case ["step", ended, sequences, tokens]:
                    notes.steps[float(ended)] = int(sequences)
                    notes.num_tokens += int(tokens)
                case ["token", ended, when, job, count]:
                    notes.ends[job].setdefault(int(count), float(ended))
                    notes.frames[job].setdefault(int(count), float(when))
                case ["append", when, job, count]:
                    notes.appends[job].setdefault(int(count), float(when))
        return notes

    def are_complete(self, lengths: Mapping[str, int], num_tokens: int) -> bool:
        """Return whether all times are there.

        Args:
            lengths: number of tokens of each noted job.
            num_tokens: number of tokens of all jobs.
        """
        return self.num_tokens >= num_tokens and all(
            count in self.frames[job] and count in self.appends[job]
            for job, count in lengths.items()
        )


class TimedHub(PubSubMultiplexer):
    """Notes the time of each message for the jobs in `noted`.

    `passages` decodes the messages after the round.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.noted: set[str] = set()
        self._channels: set[bytes] = set()
        self._messages: list[tuple[float, bytes]] = []
        self._pass_on = super()._deliver  # looked up once, because it is called for every token

    def note(self, jobs: Iterable[str]) -> None:
        """Note these jobs from now on, and drop all earlier times."""
        self.noted = set(jobs)
        self._channels.clear()
        self._messages.clear()

    async def subscribe(self, channel: str) -> MultiplexedSubscription:
        if channel.rpartition(":")[2] in self.noted:
            self._channels.add(channel.encode())
        return await super().subscribe(channel)

    def _deliver(self, message: list[Any]) -> bool:
        if message[1] in self._channels and message[0] == b"message":
            self._messages.append((time.monotonic(), message[2]))
        return self._pass_on(message)

    def passages(self) -> dict[str, Passage]:
        found: dict[str, Passage] = defaultdict(dict)
        for when, content in self._messages:
            chunk = decode_chunk(content)
            found[chunk.job_id].setdefault(chunk.end, when)
        return found


class TimedClient(AsyncClient):
    def __init__(self, url: str, *, queue: str, database: str) -> None:
        super().__init__(url, queue=queue, database=database)
        self.hub = self._multiplexer = TimedHub(self._redis)


def latencies(
    notes: Notes, heard: dict[str, Passage], told: dict[str, Passage]
) -> tuple[list[float], dict[str, Any]]:
    """Return the latencies per chunk, from its step's end to the subscriber, and the same by stage.

    The stages are of the chunks that came by pub/sub.
    """
    whole: list[float] = []
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    for job, passage in told.items():
        for count, when in passage.items():
            if count not in notes.ends[job]:
                continue
            whole.append(when - notes.ends[job][count])
            if count in notes.appends[job] and count in heard[job]:
                times = (
                    notes.ends[job],
                    notes.frames[job],
                    notes.appends[job],
                    heard[job],
                    told[job],
                )
                moments = [passage[count] for passage in times]
                for name, before, after in zip(stages, moments, moments[1:], strict=False):
                    stages[name].append(after - before)
    return whole, stages
