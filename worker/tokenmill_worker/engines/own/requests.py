"""Requests outside of steps: each is checked and turned into sequences, waits for its grammar and
adapter and for blocks that are read from the disk, is scheduled, and followed to its end.

A request that needs none of these does not wait. A request whose grammar or adapter
fails is refused with the reason; one whose deadline passes meanwhile ends; the others continue. A
request that is refused on this way, or cancelled, ends with an event that belongs to no step.

Belongs here: what happens to one request outside of a step. Which sequence computes what belongs to
`scheduler`; results for callers in the same process belong to `direct`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import (
    SEED_MASK,
    GenerationRequest,
    RequestError,
    choice_seed,
)
from tokenmill_worker.engines.limits import ModelLimits
from tokenmill_worker.engines.own.errors import sentence_of, why
from tokenmill_worker.engines.own.execution.interface import Runner
from tokenmill_worker.engines.own.kv.read_ahead import ReadAhead, read_ahead
from tokenmill_worker.engines.own.scheduler import Scheduler
from tokenmill_worker.engines.own.sequence import BULK, Sequence

# Of a request's choices, so many have its class. The others run as bulk work: they would take every
# row of the batch, and an interactive request would wait for one of them to end.
CHOICES_OF_CLASS = 4


class RequestValidator(ModelLimits):
    """Validates requests for one model."""

    def validate(self, request: GenerationRequest) -> list[Sequence]:
        """Return one sequence per choice that is not done.

        Raises RequestError, with one sentence that names the problem, if the request is refused.
        """
        limit = self.check(request)
        params = request.params.with_defaults(self.defaults)
        seed = secrets.randbits(63) if params.seed is None else params.seed & SEED_MASK
        return [
            self._sequence(request, params, choice, resumed, limit, seed)
            for choice, resumed in request.open_choices()
        ]

    def _sequence(
        self,
        request: GenerationRequest,
        params: SamplingParams,
        choice: int,
        resumed: tuple[int, ...],
        limit: int,
        seed: int,
    ) -> Sequence:
        given = request.given[choice] if request.given else ()
        length = len(request.prompt)
        wants_prompt = choice == 0 and not given and params.prompt_logprobs is not None
        return Sequence(
            request_id=request.request_id,
            token_ids=[*request.prompt.token_ids, *(given or resumed)],
            num_prompt_tokens=length,
            media=request.prompt.media,
            params=params,
            choice=choice,
            num_resumed_tokens=len(resumed),
            seed=choice_seed(seed, choice),
            priority=request.priority if choice < CHOICES_OF_CLASS else max(request.priority, BULK),
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            thoughts=request.thoughts,
            deadline=request.deadline,
            max_tokens=len(given) or limit,
            next_scored=length + len(resumed) if given else 1,
            scored_end=length + len(given) if given else length if wants_prompt else 0,
        )


@dataclass(frozen=True, slots=True)
class Prerequisites:
    """Names what a request waits for; None where it needs nothing of that kind.

    An adapter's future gives the key of the version that was loaded. Blocks are read from the disk
    once that is known, because it decides which they are.
    """

    grammar: Future[Any] | None = None
    adapter: Future[str] | None = None
    blocks: ReadAhead | None = None

    @property
    def are_met(self) -> bool:
        has_blocks = self.blocks is None or self.blocks.has_ended()
        futures = (self.grammar, self.adapter)
        return has_blocks and all(future is None or future.done() for future in futures)

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

    def take(self) -> tuple[list[tuple[Prerequisites, list[Sequence]]], list[TokenEvent]]:
        """Remove and return ready requests, and events for those that failed or expired."""
        now = self._clock()
        ready: list[tuple[Prerequisites, list[Sequence]]] = []
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
                    ends += [refusal.event(s.request_id, s.choice) for s in sequences]
                else:
                    ready.append((needs, sequences))
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


log = logging.getLogger(__name__)


class RequestTracker:
    """All requests of one engine, from their arrival until the scheduler has them.

    Not thread-safe, like the engine.
    """

    def __init__(self, validator: RequestValidator, runner: Runner, scheduler: Scheduler) -> None:
        self._validator = validator
        self._runner = runner
        self._scheduler = scheduler
        self._disk = scheduler.kv.tier.disk
        self._pending = PendingRequests()  # requests that are not schedulable yet
        self._early: list[TokenEvent] = []  # events that belong to no step: refusals, cancels

    @property
    def num_pending(self) -> int:
        """The number of requests that wait for a grammar, an adapter or blocks."""
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
                self._early.append(error.event(request.request_id))
            except Exception as error:  # a value of a wrong type, which no check has foreseen
                log.exception("Request %s is refused: it cannot be read", request.request_id)
                refusal = RequestError(f"the request cannot be read: {why(error)}")
                self._early.append(refusal.event(request.request_id))
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
        """Schedule requests whose grammar is compiled, whose adapter is loaded and whose blocks are
        read.
        """
        if self._disk is not None:
            self._disk.poll()
        if self._pending:
            ready, ends = self._pending.take()
            for needs, sequences in ready:
                if needs.blocks is not None:
                    for sequence in sequences:  # the weights may have changed meanwhile
                        sequence.block_hashes.clear()
                elif self._waits_for_blocks(needs, sequences):
                    continue
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
            if not self._waits_for_blocks(prerequisites, sequences):
                batch[request_id] = sequences
        else:
            self._pending.add(prerequisites, sequences)

    def _waits_for_blocks(self, needs: Prerequisites, sequences: list[Sequence]) -> bool:
        """Begin to read blocks from the disk; return False if there is nothing to wait for."""
        kv = self._scheduler.kv
        blocks = None if kv.tier.disk is None else read_ahead(kv, sequences)
        if blocks is not None:
            self._pending.add(replace(needs, blocks=blocks), sequences)
        return blocks is not None

    def _schedule(self, batch: dict[str, list[Sequence]]) -> None:
        if batch:
            self._scheduler.add(
                [sequence for sequences in batch.values() for sequence in sequences]
            )

    def _schedule_one(self, sequences: list[Sequence]) -> None:
        try:
            self._scheduler.add(sequences)
        except RequestError as error:
            self._early += [error.event(s.request_id, s.choice) for s in sequences]
