"""The choices of requests, for an engine that runs each by itself, as a request of another library.

Such a library reads the tokens of an earlier attempt as prompt. So a choice can begin again behind
its tokens whenever its place is needed, or the library has lost count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_worker.contract.events import Capacity, TokenEvent
from tokenmill_worker.contract.messages import CancelRequest
from tokenmill_worker.contract.requests import GenerationRequest, RequestError
from tokenmill_worker.engines.limits import ModelLimits

URGENT: Final = 0  # priority of interactive requests


@dataclass(slots=True, kw_only=True)
class RunningChoice:
    """One choice of a request.

    `resumed` are tokens of the answer that stand in the prompt: those of an earlier worker, and
    those that this one drew in earlier attempts.
    """

    request: GenerationRequest
    index: int  # of the choice in its request
    resumed: tuple[int, ...]
    limit: int  # tokens of the answer, those that are resumed included
    since: float = field(default_factory=time.time)  # their order among equal priorities
    attempt: int = 0
    drawn: list[int] = field(default_factory=list)  # in this attempt
    has_reported: bool = False
    preemptions: int = 0
    preempted_before: int = 0  # in earlier attempts

    @property
    def key(self) -> str:
        """Its id in the library, another one for each attempt."""
        return f"{self.request.request_id}#{self.index}.{self.attempt}"

    @property
    def given(self) -> tuple[int, ...]:
        return self.request.given[self.index] if self.request.given else ()

    @property
    def prompt_ids(self) -> list[int]:
        return [*self.request.prompt.token_ids, *(self.given or self.resumed)]

    @property
    def num_left(self) -> int:
        """The number of tokens that its answer may still have."""
        return self.limit - len(self.resumed) - len(self.drawn)

    @property
    def num_required(self) -> int:
        """The number of tokens that its answer must still have before it may end."""
        least = min(self.request.params.min_tokens, self.limit)
        return max(0, least - len(self.resumed) - len(self.drawn))

    @property
    def may_be_displaced(self) -> bool:
        """Return whether another attempt can go on behind the tokens that it has drawn."""
        waits = self.request.params.prompt_logprobs is not None and not self.has_reported
        return bool(self.drawn) and not (self.given or waits)

    def next_attempt(self) -> None:
        """Move what it has drawn into the prompt of another attempt."""
        self.resumed += tuple(self.drawn)
        self.drawn = []
        self.preempted_before = self.preemptions
        self.attempt += 1

    def drew(
        self,
        tokens: tuple[int, ...],
        reason: FinishReason | None,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
        num_cached: int = 0,
    ) -> TokenEvent:
        """Take in tokens that it has drawn, and return their event. `num_cached` are tokens of the
        attempt's prompt.
        """
        cached = 0 if self.has_reported else min(num_cached, len(self.request.prompt))
        self.drawn += tokens
        self.has_reported = True
        return TokenEvent(
            request_id=self.request.request_id,
            choice=self.index,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            num_cached_tokens=cached,
            preemptions=self.preemptions,
            prompt_logprobs=prompt_logprobs,
        )

    def ended(self, reason: FinishReason) -> TokenEvent:
        return TokenEvent(
            request_id=self.request.request_id, choice=self.index, finish_reason=reason
        )

    def failed(self, message: str, code: str = "invalid_request") -> TokenEvent:
        """Return the event of its end by an error of the library, whose message may have lines."""
        error = RequestError(" ".join(message.split()), code)
        return error.event(self.request.request_id, self.index)


AnyChoice = TypeVar("AnyChoice", bound=RunningChoice)


class RunningChoices(dict[str, AnyChoice], Generic[AnyChoice]):
    """The choices in a library, by their ids there, and the events of those that ended by no step.

    `kind` is the class of a choice.
    """

    def __init__(self, limits: ModelLimits, kind: type[AnyChoice]) -> None:
        super().__init__()
        self.limits, self._kind = limits, kind
        self._events: list[TokenEvent] = []

    @property
    def num_urgent(self) -> int:
        return sum(item.request.priority == URGENT for item in self.values())

    def of_request(self, request: GenerationRequest) -> list[AnyChoice]:
        """Return the choices that a request starts, to be added; none of one that is refused, which
        ends at once.
        """
        try:
            limit = self.limits.check(request)
        except RequestError as error:
            self._events.append(error.event(request.request_id))  # for all of its choices
            return []
        return [
            self._kind(request=request, index=index, resumed=resumed, limit=limit)
            for index, resumed in request.open_choices()
        ]

    def add(self, item: AnyChoice) -> None:
        self[item.key] = item

    def of(self, command: CancelRequest) -> list[AnyChoice]:
        """Return the choices that a command cancels."""
        return [
            item
            for item in self.values()
            if item.request.request_id == command.request_id
            and command.choice in (None, item.index)
        ]

    def late(self, now: float) -> list[AnyChoice]:
        """Return the choices whose deadline has passed, at a time of the monotonic clock."""
        deadlines = ((item, item.request.deadline) for item in self.values())
        return [item for item, deadline in deadlines if deadline is not None and deadline <= now]

    def end(self, items: Iterable[AnyChoice], reason: FinishReason) -> None:
        """Forget choices, each of which ends with an event."""
        self._events += [self.pop(item.key).ended(reason) for item in items]

    def refuse(self, item: AnyChoice, message: str) -> None:
        """End a choice that was not added, by an error of the library."""
        self._events.append(item.failed(message))

    def taken_events(self) -> list[TokenEvent]:
        """Return the events of choices that ended by no step, and forget them."""
        events, self._events = self._events, []
        return events

    def to_displace(self, request: GenerationRequest, free: Capacity) -> AnyChoice | None:
        """Return the youngest choice of a lower priority that can begin again, if the request would
        wait; else None.
        """
        if free.free_sequences and free.free_blocks > -(-len(request.prompt) // free.block_size):
            return None
        others = (
            item
            for item in self.values()
            if item.request.priority > request.priority and item.may_be_displaced
        )
        return max(others, key=lambda item: (item.request.priority, item.since), default=None)
