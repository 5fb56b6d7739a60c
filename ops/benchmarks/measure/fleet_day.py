"""A day of a fleet in virtual time: chats about documents, single questions and bulk files of
several tenants, in queues with a fixed number of workers (`fleet_queue`).
"""

import math
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.measure.fleet_queue import BULK, CHAT, STANDARD, Job, Queue, QueueDay
from tokenmill.bulk.pending_lines import PART_LINES

DAY_S, TENANTS = 24 * 3600, 20
DOCUMENT, QUESTION, TURNS, PAUSE_S = 3_000, 150, 8, 60.0  # medians and means of a chat
TEMPLATE, TEMPLATES, ROW = 2_000, 400, 100  # tokens of a template, templates of a file, tokens
SINGLE = 1_000  # median tokens of a single question
FILE_HOURS = {1: 8, 9: 12, 14: 6, 20: 4}  # the hour in which a file comes: the hours that it has
PART = 5_000  # lines that are submitted at once
SHARES = {"chats": 0.5, "singles": 0.1, "lines": 0.4}  # of all jobs
CASES = {  # classes whose jobs have sessions; are the lines of a file grouped?
    "sessions, groups": ((CHAT, BULK), True),
    "groups, no session": ((CHAT,), True),
    "no sessions": ((), True),
    "no groups": ((CHAT,), False),
    "neither": ((), False),
}


class Trace:
    """The jobs of one queue."""

    def __init__(self, num_jobs: int, seed: str, *, is_grouped: bool) -> None:
        self._num_jobs, self._is_grouped = num_jobs, is_grouped
        self._draw = random.Random(f"fleet {seed}")

    def arrivals(self) -> Iterator[tuple[float, list[Job]]]:
        """Yield moments and the jobs that come then, of a chat the first."""
        for number in range(round(self._num_jobs * SHARES["chats"] / TURNS)):
            prompt = QUESTION + round(DOCUMENT * self._draw.lognormvariate(0.0, 0.6))
            turns = 1 + round(self._draw.expovariate(1 / (TURNS - 1)))
            answer = self._answer()
            job = Job(CHAT, self._tenant(), number, 0, min(prompt, 16_000), answer, turns=turns)
            yield self._daytime(), [job]
        for _ in range(round(self._num_jobs * SHARES["singles"])):
            prompt = round(SINGLE * self._draw.lognormvariate(0.0, 0.8))
            yield self._daytime(), [Job(STANDARD, self._tenant(), None, 0, prompt, self._answer())]
        lines = round(self._num_jobs * SHARES["lines"] / len(FILE_HOURS))
        for hour, hours in FILE_HOURS.items():
            yield from self._file(hour, (hour + hours) * 3600.0, lines)

    def following(self, job: Job) -> tuple[float, Job] | None:
        """Return the seconds after which a chat goes on, and its next turn."""
        if job.turns <= 1:
            return None
        known = job.prompt + job.answer
        turn = Job(CHAT, job.tenant, job.prefix, known, known + QUESTION, self._answer())
        turn.turns = job.turns - 1
        return self._draw.expovariate(1 / PAUSE_S), turn

    def _file(self, hour: int, due: float, lines: int) -> Iterator[tuple[float, list[Job]]]:
        tenant, places = self._tenant(), [number % TEMPLATES for number in range(lines)]
        self._draw.shuffle(places)
        if self._is_grouped:
            parts = range(0, lines, PART_LINES)
            places = [n for first in parts for n in sorted(places[first : first + PART_LINES])]
        for first in range(0, lines, PART):
            yield (
                hour * 3600.0 + first / PART,
                [
                    Job(BULK, tenant, (hour, n), TEMPLATE, TEMPLATE + ROW, self._answer() // 2, due)
                    for n in places[first : first + PART]
                ],
            )

    def _daytime(self) -> float:
        """Draw a moment: people come from 8 to 22 o'clock, most of them at 15."""
        return (8 + 14 * math.acos(1 - 2 * self._draw.random()) / math.pi) * 3600

    def _tenant(self) -> int:
        """Draw a tenant; the first one asks for half of everything."""
        return 0 if self._draw.random() < 0.5 else self._draw.randrange(1, TENANTS)

    def _answer(self) -> int:
        return max(4, min(1_000, round(129 * self._draw.lognormvariate(0.0, 0.9))))


def measure(
    num_jobs: int, num_workers: int, num_queues: int, costs: Any
) -> dict[str, dict[str, float]]:
    """Return the figures of a fleet by case; `costs` are simulate.ScriptCosts.

    Queue number N has jobs and workers in proportion to 1/√N.
    """
    weights = [1 / math.sqrt(number + 1) for number in range(num_queues)]
    shares = [weight / sum(weights) for weight in weights]
    tasks = [
        (case, max(1, round(num_workers * share)), round(num_jobs * share), number)
        for number, share in enumerate(shares)
        for case in CASES
    ]
    with ProcessPoolExecutor() as pool:
        days = list(zip(tasks, pool.map(_day, tasks), strict=True))
    return {
        case: _figures([day for task, day in days if task[0] == case], num_workers, costs)
        for case in CASES
    }


def _day(task: tuple[str, int, int, int]) -> QueueDay:
    case, num_workers, num_jobs, number = task
    with_sessions, is_grouped = CASES[case]
    trace = Trace(num_jobs, f"{number}", is_grouped=is_grouped)
    return Queue(num_workers, TENANTS, trace, with_sessions=with_sessions).run(1.5 * DAY_S)


def _figures(days: list[QueueDay], num_workers: int, costs: Any) -> dict[str, float]:
    def total(name: str) -> float:
        return float(sum(getattr(day, name) for day in days))

    light, heavy = (
        [seconds for day in days for seconds in getattr(day, name)]
        for name in ("light_s", "heavy_s")
    )
    hours = [[calls.seconds(costs) / 3600 for calls in day.hours] for day in days]
    return {
        "jobs": total("asked"),
        "goodput": total("good") / total("asked"),
        "first_p50": percentile(light + heavy, 0.5),
        "first_p99": percentile(light, 0.99),
        "heavy_p99": percentile(heavy, 0.99),
        "hits": total("hits") / total("prompts"),
        "line_hits": total("line_hits") / total("line_prompts"),
        "computing": total("computed_s") / (num_workers * DAY_S),
        "largest": max(map(max, hours)),
        "server": max(map(sum, zip(*hours, strict=True))),
    }
