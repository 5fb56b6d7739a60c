"""Reads what a stamped worker noted: when each step ended, and when noted jobs got their tokens.

All processes of a benchmark are on one machine and read one monotonic clock. A noted job has
NOTED_SEED as its seed, which greedy sampling ignores.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

Passage = dict[int, float]  # number of tokens so far → time
NOTED_SEED = 4711


@dataclass(slots=True)
class Notes:
    """Times that the worker wrote: the sequences of each step by its end, other times by job."""

    steps: dict[float, int] = field(default_factory=dict)
    num_tokens: int = 0  # tokens of all jobs
    submits: dict[str, float] = field(default_factory=dict)
    ends: dict[str, Passage] = field(default_factory=lambda: defaultdict(dict))

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
                case ["token", ended, job, count]:
                    notes.ends[job].setdefault(int(count), float(ended))
        return notes

    def are_complete(self, lengths: Mapping[str, int], num_tokens: int) -> bool:
        """Return whether all times are there.

        Args:
            lengths: number of tokens of each noted job.
            num_tokens: number of tokens of all jobs.
        """
        return self.num_tokens >= num_tokens and all(
            count in self.ends[job] for job, count in lengths.items()
        )

    def latencies(self, received: Mapping[str, Passage]) -> list[float]:
        """Return the seconds of each noted chunk, from its step's end to its subscriber.

        Args:
            received: times at which subscribers had so many tokens, by job.
        """
        return [
            when - self.ends[job][count]
            for job, passage in received.items()
            for count, when in passage.items()
            if count in self.ends[job]
        ]
