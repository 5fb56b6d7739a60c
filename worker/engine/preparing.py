"""Requests that wait for what they need: a grammar being compiled, an adapter being loaded, both off the step's path.

What is there already costs no wait. A request whose need cannot be met is refused with the reason, one whose deadline
passes meanwhile ends; the others go on. It knows neither grammars nor adapters, only their futures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from schemas.generation import FinishReason
from worker.engine.faults import refusal_event, sentence_of
from worker.engine.sequence import Sequence
from worker.engine.types import RequestError, TokenEvent


@dataclass(frozen=True, slots=True)
class Needs:
    """None: nothing of that kind. An adapter's result is the key of the version that was loaded."""

    grammar: Future[Any] | None = None
    adapter: Future[str] | None = None

    @property
    def are_met(self) -> bool:
        return all(future is None or future.done() for future in (self.grammar, self.adapter))

    def settle(self, sequences: list[Sequence]) -> None:
        """Once they are met. Raises RequestError."""
        if self.grammar is not None and (error := self.grammar.exception()) is not None:
            raise RequestError(f"response_format cannot be used: {sentence_of(error)}") from error
        if self.adapter is None:
            return
        if (error := self.adapter.exception()) is not None:  # a ValueError is a sentence about the adapter
            raise RequestError(str(error) if isinstance(error, ValueError) else sentence_of(error)) from error
        for sequence in sequences:
            sequence.adapter = self.adapter.result()


class Preparing:
    """Each entry holds all choices of one request."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock  # of the deadlines
        self._entries: list[tuple[Needs, list[Sequence]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def cut(self, length: int) -> None:
        """Take back what was added behind the first `length`."""
        del self._entries[length:]

    def add(self, needs: Needs, sequences: list[Sequence]) -> None:
        self._entries.append((needs, sequences))

    def knows(self, request_id: str) -> bool:
        return any(sequences[0].request_id == request_id for _, sequences in self._entries)

    def request_ids(self) -> list[str]:
        return [sequences[0].request_id for _, sequences in self._entries]

    def take(self) -> tuple[list[list[Sequence]], list[TokenEvent]]:
        """Requests whose needs are met, and the ends of those whose cannot be or which it is too late for."""
        now = self._clock()
        ready: list[list[Sequence]] = []
        ends: list[TokenEvent] = []
        for entry in list(self._entries):
            needs, sequences = entry
            deadline = sequences[0].deadline
            if deadline is not None and deadline <= now:
                self._entries.remove(entry)
                ends += _ends(sequences, FinishReason.EXPIRED)
            elif needs.are_met:
                self._entries.remove(entry)
                try:
                    needs.settle(sequences)
                except RequestError as refusal:
                    ends += [refusal_event(s.request_id, refusal, s.choice) for s in sequences]
                else:
                    ready.append(sequences)
        return ready, ends

    def cancel(self, request_id: str, reason: FinishReason) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for entry in list(self._entries):
            if entry[1][0].request_id == request_id:
                self._entries.remove(entry)
                events += _ends(entry[1], reason)
        return events


def _ends(sequences: list[Sequence], reason: FinishReason) -> list[TokenEvent]:
    return [TokenEvent(request_id=s.request_id, choice=s.choice, finish_reason=reason) for s in sequences]
