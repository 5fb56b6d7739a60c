"""A token's way from the engine's step to its subscriber, taken apart by the worker's notes and the subscribers'.

    step's end ──frame──▶ I/O process ──chunk──▶ append called ──server──▶ subscriber's connection ──told──▶ its task

All processes of a benchmark are on one machine and read one monotonic clock. Of one job in so many each of them notes
its tokens; such a job has NOTED_SEED, which greedy sampling has no use for.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api_client import AsyncClient
from api_client.hub import ChannelHub, HubSubscription
from ops.benchmarks.figures import STAGES
from schemas.codec import decode_chunk

Passage = dict[int, float]  # tokens so far → when
NOTED_SEED = 4711


@dataclass(slots=True)
class Notes:
    """What the worker wrote: the sequences of each step, by its end, and the rest per job."""

    steps: dict[float, int] = field(default_factory=dict)
    num_tokens: int = 0  # of all jobs
    submits: dict[str, float] = field(default_factory=dict)
    ends: dict[str, Passage] = field(default_factory=lambda: defaultdict(dict))
    frames: dict[str, Passage] = field(default_factory=lambda: defaultdict(dict))
    appends: dict[str, Passage] = field(default_factory=lambda: defaultdict(dict))

    @classmethod
    def read(cls, path: Path, offset: int) -> "Notes":
        """Lines from `offset` on. Where something was noted twice, the first counts."""
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
        """`lengths` of the jobs that are noted, `num_tokens` of all."""
        return self.num_tokens >= num_tokens and all(
            count in self.frames[job] and count in self.appends[job] for job, count in lengths.items()
        )


class TimedHub(ChannelHub):
    """Notes when each message of the jobs in `noted` came; they are decoded when the round is over."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.noted: set[str] = set()
        self._channels: set[bytes] = set()
        self._messages: list[tuple[float, bytes]] = []
        self._pass_on = super()._hand_on  # looked up once: it is called for every token

    def note(self, jobs: Iterable[str]) -> None:
        """These from now on, and nothing of those before."""
        self.noted = set(jobs)
        self._channels.clear()
        self._messages.clear()

    async def subscribe(self, channel: str) -> HubSubscription:
        if channel.rpartition(":")[2] in self.noted:
            self._channels.add(channel.encode())
        return await super().subscribe(channel)

    def _hand_on(self, message: list[Any]) -> bool:
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
        self.hub = self._hub = TimedHub(self._redis)


def latencies(notes: Notes, heard: dict[str, Passage], told: dict[str, Passage]) -> tuple[list[float], dict[str, Any]]:
    """From step's end to subscriber, per chunk; and the same by stage, of the chunks that came by pub/sub."""
    whole: list[float] = []
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    for job, passage in told.items():
        for count, when in passage.items():
            if count not in notes.ends[job]:
                continue
            whole.append(when - notes.ends[job][count])
            if count in notes.appends[job] and count in heard[job]:
                times = (notes.ends[job], notes.frames[job], notes.appends[job], heard[job], told[job])
                moments = [passage[count] for passage in times]
                for name, before, after in zip(stages, moments, moments[1:], strict=False):
                    stages[name].append(after - before)
    return whole, stages
