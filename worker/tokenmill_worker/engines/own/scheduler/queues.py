"""The waiting sequences, in the order in which they should start, and the deadlines of all, the
earliest first.

Heaps with lazy deletion: a removed entry is only marked, so that each operation costs at most the
logarithm of the backlog, and a step never walks all of it. `admission` decides what fits and when
to start.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill_worker.engines.own.sequence import Sequence, SequenceStatus

_PROMOTIONS_PER_STEP = 64  # spreads the promotion of a large backlog over several steps


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A sequence's entry in the queue, kept from arrival to end, so that preemption keeps its turn.

    `rank` is the class after ageing. `bypassed` counts the sequences that started before it while
    it was at the head.
    """

    sequence: Sequence
    ticket: int
    arrived_at: float
    rank: int
    since: float  # when it entered its present rank
    queued: bool = False
    bypassed: int = 0
    # key of a shared block that a running step fills
    awaited: bytes | None = None
    num_lost_tokens: int = 0  # computed before a soft reset
    is_counted: bool = False  # its cache hit has been reported
    has_victims: bool = False  # others were preempted for it and it has not started yet
    is_long: bool = False  # started with more to compute than the threshold for long prefills

    def __lt__(self, other: QueueEntry) -> bool:
        return self.ticket < other.ticket


class WaitingQueue(Protocol):
    """Order of the waiting sequences.

    `len` is the number of waiting sequences. `pop` returns None when none (of rank ≤ max_rank)
    waits.
    """

    def __len__(self) -> int: ...

    def push(self, entry: QueueEntry) -> None: ...

    def put_back(self, entry: QueueEntry) -> None:
        """Undo a pop."""
        ...

    def pop(self, max_rank: int | None = None) -> QueueEntry | None: ...

    def discard(self, entry: QueueEntry) -> None: ...

    def num_below(self, rank: int) -> int:
        """Return how many sequences of a better (lower) rank wait."""
        ...

    def refresh(self, now: float) -> None:
        """Apply ageing; called once per step."""
        ...

    def charge(self, tenant: str, tokens: int) -> None:
        """Record that `tokens` tokens were computed for this tenant."""
        ...


class FifoQueue:
    """Orders sequences by ticket, that is by arrival; a preempted sequence keeps its ticket."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, QueueEntry]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def num_below(self, rank: int) -> int:
        return 0  # arrival order ignores classes

    def push(self, entry: QueueEntry) -> None:
        entry.queued = True
        self._live += 1
        heapq.heappush(self._heap, (entry.ticket, entry))

    put_back = push

    def pop(self, max_rank: int | None = None) -> QueueEntry | None:
        while self._heap:
            entry = heapq.heappop(self._heap)[1]
            if entry.queued:
                entry.queued = False
                self._live -= 1
                return entry
        return None

    def discard(self, entry: QueueEntry) -> None:
        if entry.queued:
            entry.queued = False
            self._live -= 1
            if len(self._heap) > 64 + 2 * self._live:
                self._heap = [entry for entry in self._heap if entry[1].queued]
                heapq.heapify(self._heap)

    def refresh(self, now: float) -> None:
        """Do nothing: arrival order does not age."""

    def charge(self, tenant: str, tokens: int) -> None:
        """Do nothing: arrival order ignores tenants."""


@dataclass(slots=True)
class _Class:
    """The waiting sequences of one rank.

    Each tenant has a heap by (due, ticket); tenants are ordered by tokens served.
    """

    tenants: dict[str, list[tuple[float, int, QueueEntry]]] = field(default_factory=dict)
    # (tokens served when pushed: a lower bound, tenant)
    order: list[tuple[int, str]] = field(default_factory=list)
    # by `since`, for ageing
    entered: deque[tuple[float, QueueEntry]] = field(default_factory=deque)
    live: int = 0


class PriorityQueue:
    """Orders by class, then the tenant with the fewest served tokens, then deadline, then arrival.

    Ageing: after `ageing_s` in a class a sequence moves up one class. A sequence without a deadline
    is due four times `ageing_s` after its arrival, so that a stream of sequences with deadlines
    cannot pass it for ever. A tenant that returns after a pause starts level with the tenant served
    last: idle time earns no credit.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._classes: dict[int, _Class] = {}
        self._served: dict[str, int] = {}
        self._level = 0  # the served tokens of the tenant chosen last
        self._stale = 0

    def __len__(self) -> int:
        return sum(one.live for one in self._classes.values())

    def num_below(self, rank: int) -> int:
        return sum(one.live for each, one in self._classes.items() if each < rank)

    def push(self, entry: QueueEntry) -> None:
        one = self._classes.setdefault(entry.rank, _Class())
        if entry.rank > 0:
            one.entered.append((entry.since, entry))
        self._insert(one, entry)

    def put_back(self, entry: QueueEntry) -> None:
        self._insert(self._classes[entry.rank], entry)

    def _insert(self, one: _Class, entry: QueueEntry) -> None:
        sequence = entry.sequence
        tenant = sequence.tenant
        entry.queued = True
        one.live += 1
        if tenant not in one.tenants:
            one.tenants[tenant] = []
            served = self._served[tenant] = max(self._served.get(tenant, 0), self._level)
            heapq.heappush(one.order, (served, tenant))
        due = (
            entry.arrived_at + 4 * self._ageing_s
            if sequence.deadline is None
            else sequence.deadline
        )
        heapq.heappush(one.tenants[tenant], (due, entry.ticket, entry))

    def pop(self, max_rank: int | None = None) -> QueueEntry | None:
        for rank in sorted(self._classes):
            if max_rank is not None and rank > max_rank:
                return None
            one = self._classes[rank]
            if one.live:
                return self._pop_from(one, rank)
        return None

    def _pop_from(self, one: _Class, rank: int) -> QueueEntry | None:
        while one.order:
            bound, tenant = one.order[0]
            waiting = one.tenants[tenant]
            while waiting and not (waiting[0][2].queued and waiting[0][2].rank == rank):
                heapq.heappop(waiting)
            served = self._served[tenant]
            if not waiting:
                heapq.heappop(one.order)
                del one.tenants[tenant]
            elif served > bound:
                heapq.heapreplace(one.order, (served, tenant))
            else:
                entry = heapq.heappop(waiting)[2]
                entry.queued = False
                one.live -= 1
                self._level = max(self._level, served)
                return entry
        return None

    def discard(self, entry: QueueEntry) -> None:
        if entry.queued:
            entry.queued = False
            self._classes[entry.rank].live -= 1
            self._stale += 1
            if self._stale > 64 + len(self):
                self._compact()

    def refresh(self, now: float) -> None:
        for rank in sorted(self._classes):
            if rank > 0:
                self._promote(rank, now)

    def _promote(self, rank: int, now: float) -> None:
        one = self._classes[rank]
        for _ in range(_PROMOTIONS_PER_STEP):
            if not one.entered:
                return
            since, entry = one.entered[0]
            if entry.queued and entry.rank == rank and entry.since == since:
                if since + self._ageing_s > now:
                    return
                one.live -= 1
                entry.rank, entry.since, entry.queued = rank - 1, now, False
                self.push(entry)
            one.entered.popleft()

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] = self._served.get(tenant, self._level) + tokens
        if len(self._served) > 10_000:  # tenants at or below the level restart at the level anyway
            waiting = {name for one in self._classes.values() for name in one.tenants}
            self._served = {
                k: v for k, v in self._served.items() if v > self._level or k in waiting
            }

    def _compact(self) -> None:
        """Remove entries of sequences that left; their number has paid for the walk."""
        self._stale = 0
        for rank, one in self._classes.items():
            one.entered = deque(
                e for e in one.entered if e[1].queued and e[1].rank == rank and e[1].since == e[0]
            )
            for waiting in one.tenants.values():
                waiting[:] = [
                    entry for entry in waiting if entry[2].queued and entry[2].rank == rank
                ]
                heapq.heapify(waiting)


def order_for_prefix_hits(sequences: list[Sequence], block_size: int) -> list[Sequence]:
    """Return the sequences with those that share their first block side by side.

    Groups keep the order in which their first members arrived. Within a group, descending token
    order puts a prompt before its own prefixes, so that one computation serves all of them.
    """
    groups: dict[tuple[str, str, tuple[int, ...]], list[Sequence]] = {}
    for sequence in sequences:
        first_block = tuple(sequence.token_ids[:block_size])
        groups.setdefault((sequence.cache_salt, sequence.adapter, first_block), []).append(sequence)
    ordered: list[Sequence] = []
    for group in groups.values():
        if len(group) > 1:
            # stable: choices keep their order
            group.sort(key=lambda sequence: sequence.token_ids, reverse=True)
        ordered += group
    return ordered


class Deadlines:
    """A heap whose entries outlive their sequences for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_open = 0  # sequences that have not ended

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence, ticket: int) -> None:
        if sequence.deadline is not None:
            heapq.heappush(self._heap, (sequence.deadline, ticket, sequence))
            self._num_open += 1

    def forget(self, sequence: Sequence) -> None:
        """Note that the sequence has ended; sweep the heap when most of its entries are of such.

        A deadline may be a day away, so entries of ended sequences would pile up.
        """
        if sequence.deadline is None:
            return
        self._num_open -= 1
        if len(self._heap) > 128 + 2 * self._num_open:
            self._heap = [entry for entry in self._heap if _is_open(entry[2])]
            heapq.heapify(self._heap)

    def take_passed(self) -> list[Sequence]:
        """Remove and return the sequences whose deadline has passed; the caller ends them.

        Only the earliest deadline is examined while none has passed.
        """
        heap, passed = self._heap, []
        if heap and heap[0][0] <= (now := self._clock()):
            while heap and heap[0][0] <= now:
                sequence = heapq.heappop(heap)[2]
                if _is_open(sequence):
                    passed.append(sequence)
        return passed


def _is_open(sequence: Sequence) -> bool:
    return sequence.status is not SequenceStatus.FINISHED
