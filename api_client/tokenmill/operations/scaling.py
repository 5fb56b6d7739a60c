"""Counts the workers that a queue needs, so that its jobs end within their deadlines.

What waits and what runs is counted in estimated tokens, beside the pace that was measured at the
queue's workers. Nothing is read or kept here: the caller reads the queue, and gives the last answer
back. Jobs of a later time count from the moment at which they are due.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from tokenmill.operations.overview import QueueState
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.job import Priority

URGENT_S: Final = {Priority.INTERACTIVE: 60.0, Priority.STANDARD: 300.0}  # to work off a backlog
UNDATED_S: Final = 6 * 3600.0  # the same for bulk jobs that have no deadline
USED_TIME: Final = 0.8  # share of the time to a deadline: estimates and starts take the rest
USED_PLACES: Final = 0.85  # share of a worker's places that urgent jobs may fill
LEAST_S: Final = 120.0  # no time is taken for shorter: a worker has to start first
HOLD_S: Final = 600.0  # the number falls when it was smaller for so long
_HALF_FULL: Final = 0.5  # workers with less to do tell little about their pace


class WorkersWanted(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that a queue needs, and why.

    `pace`: estimated tokens that a full worker ends per second; 0: none was measured. `now` are the
    workers that there are, `starting` those of them that load their model. `recent` are the numbers
    of the last minutes, as (Unix ms, number).
    """

    queue: str
    workers: int
    reason: str
    now: int = 0
    starting: int = 0
    pace: float = 0.0
    places: float = 0.0  # sequences that a worker runs at once
    recent: tuple[tuple[int, int], ...] = ()


def workers_wanted(state: QueueState, last: WorkersWanted | None = None) -> WorkersWanted:
    """Return the number for a queue. With the `last` answer it does not fall before HOLD_S, and
    remembers the pace of workers that are gone.
    """
    living = [worker for worker in state.workers if not worker.draining]
    ready = [worker for worker in living if worker.model]
    pace = _pace(ready) or (last.pace if last else 0.0)
    places = (
        sum(worker.max_running for worker in ready) / len(ready)
        if ready
        else (last.places if last else 0.0)
    )
    number, reason = _needed(state, ready, pace, places)
    since = state.now_ms - HOLD_S * 1000
    recent = [entry for entry in (last.recent if last else ()) if entry[0] >= since]
    recent = [*(entry for entry in recent if entry[1] > number), (state.now_ms, number)]
    if recent[0][1] > number:
        minutes = round(HOLD_S / 60)
        reason = f"{recent[0][1]} were needed within the last {minutes} minutes; now: {reason}"
    return WorkersWanted(
        queue=state.queue,
        workers=recent[0][1],
        reason=reason,
        now=len(living),
        starting=len(living) - len(ready),
        pace=round(pace, 1),
        places=places,
        recent=tuple(recent),
    )


def _needed(
    state: QueueState, ready: list[WorkerStatus], pace: float, places: float
) -> tuple[int, str]:
    urgent = sum(worker.urgent for worker in ready)
    if not state.waiting and not state.running:
        return 0, "nothing waits and nothing runs"
    if not state.waiting and not urgent:
        return 1, "nothing waits, and bulk jobs run"
    busy = urgent / (places * USED_PLACES) if places else 0.0
    tokens, seconds, what = max(_demands(state), key=lambda demand: demand[0] / demand[1])
    if not pace:
        number = max(1, len(ready), math.ceil(busy))
        return number, "jobs wait, and no worker's pace was measured yet"
    rate = tokens / seconds
    number = max(1, math.ceil(round(busy + rate / pace, 3)))
    words = f"{what}: {tokens:,.0f} tokens in {_span(seconds)}, {pace:,.0f} tokens/s a worker"
    if not rate:
        words = "nothing waits"
    return number, f"{words}; {urgent:,} urgent jobs run" if urgent else words


def _demands(state: QueueState) -> Iterator[tuple[float, float, str]]:
    """Yield estimated tokens, the seconds in which they are to end, and what they are. More urgent
    classes are served first, so their tokens count as part of those of the later ones.
    """
    before = 0.0
    for priority, seconds in URGENT_S.items():
        one = state.classes[priority.value]
        before += one.waiting_tokens
        yield before, seconds, f"{priority.value} jobs"
    bulk = state.classes[Priority.BULK.value]
    num_dated = max((count for count, _ in state.deadlines), default=0)
    undated = max(0, bulk.waiting - num_dated)
    if undated:
        left_s = max(LEAST_S, UNDATED_S - bulk.oldest_ms / 1000)
        yield before + bulk.waiting_tokens * undated / bulk.waiting, left_s, "bulk jobs"
    each = sum(one.waiting_tokens for one in state.classes.values()) / max(1, state.waiting)
    for count, due_ms in state.deadlines:
        left_s = max(LEAST_S, USED_TIME * (due_ms - state.now_ms) / 1000)
        yield min(count, state.waiting) * each, left_s, "jobs with deadlines"


def _pace(ready: list[WorkerStatus]) -> float:
    """Return the pace of a full worker: the mean of those that are at least half full. Before a job
    has ended, and for workers of an older version, it is that of their answers' tokens.
    """
    paces = [(worker.pace, _load(worker)) for worker in ready if worker.pace]
    paces = paces or [(worker.tokens_per_s, _load(worker)) for worker in ready]
    full = [(pace, load) for pace, load in paces if load >= _HALF_FULL] or paces
    return sum(pace / max(load, _HALF_FULL) for pace, load in full) / max(1, len(full))


def _load(worker: WorkerStatus) -> float:
    """Return the share of its places or of its cache that a worker uses, the larger one."""
    used = 1 - worker.free_blocks / worker.total_blocks if worker.total_blocks else 0.0
    return min(1.0, max(worker.running / max(1, worker.max_running), used))


def _span(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
