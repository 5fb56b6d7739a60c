"""Tracks requests outside of steps: validated, waiting for a grammar or adapter, then scheduled.

A request that is refused on this way, or cancelled, ends with an event that belongs to no step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import GenerationRequest, RequestError
from tokenmill_worker.engines.own.errors import refusal_event, why
from tokenmill_worker.engines.own.execution.interface import Runner
from tokenmill_worker.engines.own.requests.pending import PendingRequests, Prerequisites
from tokenmill_worker.engines.own.requests.validation import RequestValidator
from tokenmill_worker.engines.own.scheduler import Scheduler
from tokenmill_worker.engines.own.sequence import Sequence

log = logging.getLogger(__name__)


class RequestTracker:
    """All requests of one engine, from their arrival until the scheduler has them.

    Not thread-safe, like the engine.
    """

    def __init__(self, validator: RequestValidator, runner: Runner, scheduler: Scheduler) -> None:
        self._validator = validator
        self._runner = runner
        self._scheduler = scheduler
        self._pending = PendingRequests()  # requests that are not schedulable yet
        self._early: list[TokenEvent] = []  # events that belong to no step: refusals, cancels

    @property
    def num_pending(self) -> int:
        """The number of requests that wait for a grammar or an adapter."""
        return len(self._pending)

    @property
    def has_early(self) -> bool:
        """Return whether events wait that belong to no step."""
        return bool(self._early)

    def request_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended."""
        return [*self._scheduler.request_ids(), *self._pending.request_ids()]

    def take_early(self) -> list[TokenEvent]:
        """Remove and return the events that belong to no step."""
        early, self._early = self._early, []
        return early

    # ── adding and cancelling ──

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Add requests together. Each refused one ends with an early event."""
        batch: dict[str, list[Sequence]] = {}
        for request in requests:
            try:
                self._enqueue(request, batch)
            except RequestError as error:
                self._early.append(refusal_event(request.request_id, error))
            except Exception as error:  # a value of a wrong type, which no check has foreseen
                log.exception("Request %s is refused: it cannot be read", request.request_id)
                refusal = RequestError(f"the request cannot be read: {why(error)}")
                self._early.append(refusal_event(request.request_id, refusal))
        try:
            self._schedule(batch)
        except RequestError:
            for sequences in batch.values():
                self._schedule_one(sequences)

    def cancel(self, request_id: str, reason: FinishReason, choice: int | None) -> bool:
        """End a request (or one choice) in any state.

        Return False if it is unknown or has ended.
        """
        events = self._pending.cancel(request_id, reason, choice)
        events += self._scheduler.cancel(request_id, reason, choice)
        self._early += events
        return bool(events)

    def schedule_prepared(self) -> None:
        """Schedule requests whose grammar is compiled and whose adapter is loaded."""
        if self._pending:
            ready, ends = self._pending.take()
            for sequences in ready:
                self._schedule_one(sequences)
            self._early += ends

    def _enqueue(self, request: GenerationRequest, batch: dict[str, list[Sequence]]) -> None:
        sequences = self._validator.validate(request)
        request_id = request.request_id
        if (
            request_id in batch
            or self._scheduler.knows(request_id)
            or self._pending.knows(request_id)
        ):
            raise RequestError(f"request id {request_id!r} is already in use")
        params = request.params
        prerequisites = Prerequisites(
            self._runner.prepare(params, request.tenant)
            if params.response_format is not None
            else None,
            self._runner.prepare_adapter(params.lora) if params.lora else None,
        )
        if prerequisites.are_met:
            prerequisites.assign(sequences)
            batch[request_id] = sequences
        else:
            self._pending.add(prerequisites, sequences)

    def _schedule(self, batch: dict[str, list[Sequence]]) -> None:
        if batch:
            self._scheduler.add(
                [sequence for sequences in batch.values() for sequence in sequences]
            )

    def _schedule_one(self, sequences: list[Sequence]) -> None:
        try:
            self._scheduler.add(sequences)
        except RequestError as error:
            self._early += [refusal_event(s.request_id, error, s.choice) for s in sequences]
