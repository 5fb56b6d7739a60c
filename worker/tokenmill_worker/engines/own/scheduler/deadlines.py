"""Deadlines of sequences that have not ended, the earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tokenmill_worker.engines.own.sequence import Sequence, SequenceStatus


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
