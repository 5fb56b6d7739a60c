"""Bounds claims: the room that the worker has, and what is known of the queue's backlog."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill_worker.engine.types import Capacity

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


def credits_of(capacity: Capacity, num_in_engine: int, num_urgent: int) -> Credits:
    """Return the room of an engine that has been sent `num_in_engine` requests, `num_urgent` of
    them interactive.
    """
    # Requests that were sent, and that no frame has counted yet.
    in_flight = max(0, num_in_engine - capacity.running - capacity.waiting)
    free = max(0, capacity.free_sequences + LOOKAHEAD - capacity.waiting - in_flight)
    urgent = max(0, capacity.free_urgent - free - min(in_flight, num_urgent))
    return Credits(free, urgent)


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
