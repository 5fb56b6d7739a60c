"""Bounds claims: the room that the worker has, and what is known of the queue's backlog."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from itertools import chain, islice

from tokenmill_worker.contract.events import Capacity

# Jobs claimed beyond the free places, so that the next step fills a place that becomes free.
LOOKAHEAD = 4


@dataclass(frozen=True, slots=True)
class Credits:
    """The room for a claim. `free`: jobs of any class that could start soon. `urgent`: further
    interactive jobs, which take the places of bulk work.
    """

    free: int = 0
    urgent: int = 0

    def __bool__(self) -> bool:
        return self.free > 0 or self.urgent > 0


def credits_of(
    capacity: Capacity,
    in_engine: dict[str, None],
    preparing: Collection[str],
    urgent: Container[str],
) -> Credits:
    """Return the room of an engine as its last frame reports it, minus the jobs that this frame
    does not count: those in preparation, and the last ones sent.

    Args:
        capacity: The report of the last frame. It counts the interactive jobs that it knows.
        in_engine: The ids of the requests sent to the engine, in the order of their sending.
        preparing: The ids of the requests that will be sent.
        urgent: The ids of the interactive ones among both.
    """
    num_sent = max(0, len(in_engine) - capacity.running - capacity.waiting)
    uncounted = chain(preparing, islice(reversed(in_engine), num_sent))
    num_uncounted_urgent = sum(request_id in urgent for request_id in uncounted)
    num_uncounted = len(preparing) + num_sent
    free = max(0, capacity.free_sequences + LOOKAHEAD - capacity.waiting - num_uncounted)
    return Credits(free, max(0, capacity.free_urgent - free - num_uncounted_urgent))


@dataclass(slots=True)
class BacklogHint:
    """Flags that say whether the queue may hold jobs of `any` class, and `urgent` ones."""

    any: bool = True
    urgent: bool = True

    def wake(self) -> None:
        """Note that jobs of both kinds may wait."""
        self.any = self.urgent = True

    def note_claim(self, wanted: Credits, num_claimed: int) -> None:
        """Record the size of a claim. If it returned fewer jobs than requested, no such job is
        waiting. If it returned all, more may wait, and no wake-up will come for them: the queue
        registers a worker as idle only while it has room (claim.lua).
        """
        self.any = num_claimed >= wanted.free
        self.urgent = num_claimed >= wanted.free + wanted.urgent

    def is_met_by(self, credits: Credits) -> bool:
        """Is there room for a job that may wait?"""
        return (credits.free > 0 and self.any) or (credits.urgent > 0 and self.urgent)
