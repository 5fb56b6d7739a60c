"""A day of one queue whose workers are as many as `workers_wanted` says, in ticks.

People's jobs come as in a day of a large service, and files of bulk jobs with deadlines at some
hours. A job of a person is good if it starts within GOOD_S, a line if it ends before its deadline.
The ideal fleet is large enough at every moment and needs no time to start: it serves people at
once, and lines in the places that are left, as late as it likes.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tokenmill.operations.overview import ClassState, QueueState
from tokenmill.operations.scaling import workers_wanted
from tokenmill_schemas.control import WorkerStatus

TICK_S, START_S, GOOD_S, DAY_S = 15, 180, 30, 24 * 3600
PACE, PLACES = 20_000.0, 256  # of a worker: estimated tokens a second, and sequences
FULL = PACE * TICK_S  # tokens of a worker in a tick
JOB, LINE = 500.0, 400.0  # estimated tokens
FILES = {1: (1_500_000, 6), 9: (3_000_000, 12), 14: (400_000, 4), 20: (900_000, 3)}
"""By hour: the lines of a file, and the hours that it has."""


@dataclass
class Day:
    """Queue and fleet at a moment. Entries of `people` and `files` are [moment, tokens]."""

    people: deque[list[float]] = field(default_factory=deque)  # by arrival
    files: list[list[float]] = field(default_factory=list)  # by deadline
    workers: list[float] = field(default_factory=list)  # when each began to start, oldest first
    good: float = 0.0

    def serve(self, now: float) -> tuple[float, float]:
        """Serve a tick; return the tokens of people and of lines."""
        room = at_first = FULL * self.num_ready(now)
        room -= (urgent := self._take(self.people, room, lambda at: now - at <= GOOD_S))
        room -= self._take(self.files, room, lambda due: now <= due)
        return urgent, at_first - room - urgent

    def num_ready(self, now: float) -> int:
        return sum(now - since >= START_S for since in self.workers)

    def _take(self, entries, room, is_good) -> float:  # type: ignore[no-untyped-def]
        taken = 0.0
        while entries and taken < room:
            part = min(room - taken, entries[0][1])
            taken += part
            self.good += part * is_good(entries[0][0])
            entries[0][1] -= part
            if entries[0][1] <= 0:
                del entries[0]
        return taken

    def state(self, now: float, urgent: float, lines: float) -> QueueState:
        """Return the queue as a reader sees it."""
        ready, now_ms = self.num_ready(now), round(now * 1000)
        used, urgently = ((n / (ready * FULL) if ready else 0.0) for n in (urgent + lines, urgent))
        working: dict[str, Any] = {
            "model": "m", "running": round(PLACES * used), "max_running": PLACES,
            "pace": PACE * used, "urgent": round(PLACES * urgently),
        }  # fmt: skip
        counts, due = 0, []
        for deadline, tokens in self.files:
            counts += math.ceil(tokens / LINE)
            due.append((counts, round(deadline * 1000)))
        people, bulk = (sum(n for _, n in entries) for entries in (self.people, self.files))
        classes = {
            "interactive": ClassState(
                waiting=math.ceil(people / JOB), waiting_tokens=round(people)
            ),
            "standard": ClassState(),
            "bulk": ClassState(waiting=counts, waiting_tokens=round(bulk)),
        }
        return QueueState(
            queue="day", classes=classes, running=round(ready * PLACES * used), scheduled=0,
            unrecorded=0, dead=0, submitted=0, finished={}, entries_dropped=0, tenants=[],
            workers=[
                WorkerStatus(worker_id=str(n), **(working if now - since >= START_S else {}))
                for n, since in enumerate(self.workers)
            ],
            now_ms=now_ms, deadlines=tuple(due),
        )  # fmt: skip


def asked_by_people(now: float, draw: random.Random) -> float:
    """Draw the tokens that people ask for in a tick: none at night, most in the afternoon."""
    share = math.sin((now / DAY_S * 24 - 8) / 14 * math.pi)  # from 8 to 22 o'clock
    mean = 120_000 * TICK_S * max(0.0, share)
    return max(0.0, draw.gauss(mean, math.sqrt(mean * JOB)))


def measure(seed: int = 0, *, people: bool = True, files: bool = True) -> dict[str, float]:
    """Return goodput, worker hours as a multiple of the ideal's, and how often the number turned
    from growing to falling or back.
    """
    day, draw, last = Day(), random.Random(f"day {seed}"), None
    asked = hours = ideal = 0.0
    numbers: list[int] = []
    for now in range(0, DAY_S, TICK_S):
        tokens = asked_by_people(now, draw) * people
        if tokens:
            day.people.append([float(now), tokens])
        if files and not now % 3600 and now // 3600 in FILES:
            count, has_hours = FILES[now // 3600]
            day.files.append([now + has_hours * 3600.0, count * LINE])
            day.files.sort()
            asked += count * LINE
        asked += tokens
        ideal += math.ceil(tokens / FULL)
        last = workers_wanted(day.state(now, *day.serve(now)), last)
        hours += len(day.workers)
        numbers.append(last.workers)
        day.workers = [*day.workers[: last.workers]]
        day.workers += [float(now)] * (last.workers - len(day.workers))
    steps = [b - a for a, b in pairwise(numbers) if a != b]
    turns = sum(a * b < 0 for a, b in pairwise(steps))
    return {
        "goodput": day.good / asked,
        "hours": hours / max(ideal, asked / FULL),
        "most": float(max(numbers)),
        "turns": float(turns),
    }
