"""The number of workers that a queue needs: tables of states and answers."""

from typing import Any

import pytest

from ops.benchmarks.measure import scaling_day
from tokenmill.operations.overview import ClassState, QueueState
from tokenmill.operations.scaling import HOLD_S, WorkersWanted, workers_wanted
from tokenmill_schemas.control import WorkerStatus

NOW_MS = 1_795_000_000_000
HOUR_MS = 3_600_000


def full(number: int, **changes: Any) -> list[WorkerStatus]:
    """Return workers that end 10,000 estimated tokens a second with every place taken."""
    values: dict[str, Any] = {
        "model": "m",
        "running": 256,
        "max_running": 256,
        "pace": 10_000.0,
    } | changes
    return [WorkerStatus(worker_id=f"w{place}", **values) for place in range(number)]


def state(
    interactive: int = 0,
    standard: int = 0,
    bulk: int = 0,
    *,
    due: tuple[tuple[int, float], ...] = (),
    workers: list[WorkerStatus] | None = None,
    at_s: float = 0.0,
    **changes: Any,
) -> QueueState:
    """Return a queue with so many waiting jobs of 1,000 tokens; `due` are (jobs, hours)."""
    waiting = {"interactive": interactive, "standard": standard, "bulk": bulk}
    workers = full(1) if workers is None else workers
    values = {"running": sum(worker.running for worker in workers), "scheduled": 0} | changes
    now_ms = NOW_MS + round(at_s * 1000)
    return QueueState(
        queue="q",
        classes={
            name: ClassState(waiting=count, waiting_tokens=1000 * count)
            for name, count in waiting.items()
        },
        unrecorded=0, dead=0, submitted=0, finished={}, entries_dropped=0, tenants=[],
        workers=workers, now_ms=now_ms,
        deadlines=tuple((count, round(now_ms + hours * HOUR_MS)) for count, hours in due),
        **values,
    )  # fmt: skip


IDLE = full(2, running=0, pace=0.0)


@pytest.mark.parametrize(
    ("queue", "number", "words"),
    [
        (state(workers=[]), 0, "nothing waits"),
        (state(workers=IDLE), 0, "nothing waits"),
        (state(workers=IDLE, scheduled=10**6), 0, "nothing waits"),  # jobs of a later time
        (state(interactive=1, workers=[]), 1, "no worker's pace was measured"),
        (state(bulk=10**6, workers=[]), 1, "no worker's pace was measured"),
        (state(bulk=10**6, workers=IDLE), 2, "no worker's pace was measured"),
        (state(workers=full(8)), 1, "bulk jobs run"),  # what runs of bulk keeps no fleet
        (state(workers=full(4, urgent=256)), 5, "1,024 urgent jobs run"),
        (state(workers=full(4, urgent=20)), 1, "80 urgent jobs run"),
        (state(interactive=2_400), 4, "interactive jobs: 2,400,000 tokens in 60 s"),
        (state(standard=9_000), 3, "standard jobs: 9,000,000 tokens in 300 s"),
        (state(interactive=100, standard=9_000), 4, "standard jobs"),
        (state(bulk=216_000), 1, "bulk jobs: 216,000,000 tokens in 6.0 h"),
        (state(bulk=864_000), 4, "bulk jobs"),
        # 864,000 lines of 24 hours: 80 % of the time
        (state(bulk=864_000, due=((1, 24), (864_000, 24))), 2, "jobs with deadlines"),
        (state(bulk=864_000, due=((1, 2), (864_000, 2))), 15, "in 96 min"),
        (state(bulk=864_000, due=((1, 0.001), (864_000, 24))), 2, "jobs with deadlines"),
        (state(bulk=864_000, due=((288_000, 2), (864_000, 24))), 5, "288,000,000 tokens"),
        (state(bulk=10, due=((10**6, 1),)), 1, "10,000 tokens"),  # others are scheduled
        (state(bulk=864_000, workers=full(4, urgent=128)), 7, "512 urgent jobs run"),
        # the pace of a worker that is half full counts for a full one
        (state(bulk=864_000, workers=full(2, running=128, pace=5_000.0)), 4, "10,000 tokens/s"),
        (state(bulk=864_000, workers=[*full(1), *full(1, running=1, pace=9.0)]), 4, "10,000"),
        (state(bulk=864_000, workers=[*full(1), WorkerStatus(worker_id="new")]), 4, "10,000"),
        (state(bulk=864_000, workers=[*full(1), *full(1, draining=True, pace=1.0)]), 4, "10,000"),
        # of an older version
        (state(bulk=864_000, workers=full(2, pace=0.0, tokens_per_s=2_000.0)), 20, "2,000"),
        # its cache is full before its places are
        (
            state(bulk=864_000, workers=full(1, running=25, total_blocks=100, free_blocks=0)),
            4,
            "10,000 tokens/s",
        ),
    ],
)
def test_a_queue_needs_a_number_of_workers(queue: QueueState, number: int, words: str) -> None:
    answer = workers_wanted(queue)
    assert (answer.workers, words in answer.reason) == (number, True), answer


def test_workers_that_start_are_counted_and_change_no_number() -> None:
    starting = [WorkerStatus(worker_id=f"new{place}") for place in range(3)]
    answer = workers_wanted(state(bulk=864_000, workers=[*full(1), *starting]))
    assert (answer.workers, answer.now, answer.starting) == (4, 4, 3)


def test_the_number_rises_at_once_and_falls_after_ten_minutes() -> None:
    last: WorkersWanted | None = None
    seen = []
    for at_s in range(0, round(HOLD_S) + 120, 30):
        waiting = 864_000 if at_s == 30 else 216_000
        last = workers_wanted(state(bulk=waiting, at_s=at_s), last)
        seen.append(last.workers)
        assert len(last.recent) <= 2
    assert seen[:2] == [1, 4]
    assert seen[1:22] == [4] * 21  # until 600 s after it was needed
    assert seen[22:] == [1] * len(seen[22:])


def test_the_pace_of_workers_that_are_gone_is_remembered() -> None:
    before = workers_wanted(state(bulk=10))
    later = workers_wanted(state(bulk=864_000, workers=[], running=0, at_s=9_000), before)
    assert (later.workers, later.pace) == (4, 10_000.0)


def test_a_day_is_served_with_few_more_hours_than_the_ideal() -> None:
    day = scaling_day.measure()
    assert day["goodput"] >= 0.97
    assert day["hours"] <= 1.15
    assert day["turns"] <= 12  # of 5,760 answers: three files, and people's day
