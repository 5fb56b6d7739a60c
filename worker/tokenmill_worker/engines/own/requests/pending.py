"""Requests that wait until their grammar is compiled and their adapter is loaded, outside of steps.

A request whose grammar and adapter are ready does not wait. A request whose grammar or adapter
fails is refused with the reason; one whose deadline passes meanwhile ends; the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import RequestError
from tokenmill_worker.engines.own.errors import refusal_event, sentence_of
from tokenmill_worker.engines.own.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Prerequisites:
    """Futures that a request waits for; None where it needs nothing of that kind.

    An adapter's future gives the key of the version that was loaded.
    """

    grammar: Future[Any] | None = None
    adapter: Future[str] | None = None

    @property
    def are_met(self) -> bool:
        return all(future is None or future.done() for future in (self.grammar, self.adapter))

    def assign(self, sequences: list[Sequence]) -> None:
        """Assign the results to the sequences; all futures must be done.

        Raises RequestError if the grammar or the adapter failed.
        """
        if self.grammar is not None and (error := self.grammar.exception()) is not None:
            reason = str(error) if isinstance(error, ValueError) else sentence_of(error)
            wanted = sequences[0].params.response_format
            what = "response_format" if wanted is None or wanted.calls is None else "tools"
            refusal = f"{what} cannot be used: {reason}"
            if isinstance(error, RequestError):
                raise RequestError(refusal, error.code) from error
            raise RequestError(refusal) from error
        for sequence in sequences:
            sequence.grammar = None if self.grammar is None else self.grammar.result()
        if self.adapter is None:
            return
        # a ValueError's message is a sentence for the user
        if (error := self.adapter.exception()) is not None:
            raise RequestError(
                str(error) if isinstance(error, ValueError) else sentence_of(error)
            ) from error
        for sequence in sequences:
            sequence.adapter = self.adapter.result()


class PendingRequests:
    """Waiting requests by id, each with its choices that have not ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  # the clock of the deadlines
        self._requests: dict[str, tuple[Prerequisites, list[Sequence]]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, needs: Prerequisites, sequences: list[Sequence]) -> None:
        self._requests[sequences[0].request_id] = (needs, sequences)

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def request_ids(self) -> list[str]:
        return list(self._requests)

    def take(self) -> tuple[list[list[Sequence]], list[TokenEvent]]:
        """Remove and return ready requests, and events for those that failed or expired."""
        now = self._clock()
        ready: list[list[Sequence]] = []
        ends: list[TokenEvent] = []
        for request_id, (needs, sequences) in list(self._requests.items()):
            deadline = sequences[0].deadline
            if deadline is not None and deadline <= now:
                del self._requests[request_id]
                ends += _ends(sequences, FinishReason.EXPIRED)
            elif needs.are_met:
                del self._requests[request_id]
                try:
                    needs.assign(sequences)
                except RequestError as refusal:
                    ends += [refusal_event(s.request_id, refusal, s.choice) for s in sequences]
                else:
                    ready.append(sequences)
        return ready, ends

    def cancel(self, request_id: str, reason: FinishReason, choice: int | None) -> list[TokenEvent]:
        """End a request, or one choice of it; other choices keep waiting."""
        if request_id not in self._requests:
            return []
        needs, sequences = self._requests[request_id]
        ended = [s for s in sequences if choice is None or s.choice == choice]
        left = [s for s in sequences if s not in ended]
        if left:
            self._requests[request_id] = (needs, left)
        else:
            del self._requests[request_id]
        return _ends(ended, reason)


def _ends(sequences: list[Sequence], reason: FinishReason) -> list[TokenEvent]:
    return [
        TokenEvent(request_id=s.request_id, choice=s.choice, finish_reason=reason)
        for s in sequences
    ]
