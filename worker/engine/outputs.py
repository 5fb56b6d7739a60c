"""What users of the engine object see of its events: growing outputs, streams, finished results.

Only requests added through the engine's own calls are collected; a host that forwards events keeps its
own books. It knows nothing of scheduling.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from schemas.generation import FinishReason, TokenLogprob
from worker.engine.types import GenerationOutput, TokenEvent


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class _Collected:
    num_prompt_tokens: int
    choices: list[_Choice]
    wants_logprobs: bool
    events: deque[TokenEvent] = field(default_factory=deque)

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)


class Outputs:
    """Events by request, until their result is taken. Safe for one producer and many reading threads."""

    def __init__(self) -> None:
        self._requests: dict[str, _Collected] = {}
        self._finished: dict[str, None] = {}  # in the order of their ends
        self._changed = threading.Condition()

    def open(self, request_id: str, num_prompt_tokens: int, n: int, wants_logprobs: bool) -> None:
        with self._changed:
            choices = [_Choice() for _ in range(n)]
            self._requests[request_id] = _Collected(num_prompt_tokens, choices, wants_logprobs)

    def discard(self, request_id: str) -> None:
        with self._changed:
            self._forget(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def deliver(self, events: list[TokenEvent]) -> None:
        """Called by whoever steps the engine; events of requests that nobody collects are passed over."""
        if not self._requests:
            return
        with self._changed:
            for event in events:
                collected = self._requests.get(event.request_id)
                if collected is not None:
                    self._apply(collected, event)
            self._changed.notify_all()

    def _apply(self, collected: _Collected, event: TokenEvent) -> None:
        choice = collected.choices[event.choice]
        if choice.finish_reason is not None:
            return
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs or ()
        choice.num_cached_tokens = choice.num_cached_tokens or event.num_cached_tokens
        choice.finish_reason, choice.error = event.finish_reason, event.error
        collected.events.append(event)
        if collected.is_finished:
            self._finished[event.request_id] = None

    def is_finished(self, request_id: str) -> bool:
        return self._requests[request_id].is_finished

    def next_event(self, request_id: str) -> TokenEvent | None:
        """The oldest unread event of a request; None while there is none. Raises KeyError if unknown."""
        events = self._requests[request_id].events
        return events.popleft() if events else None

    def wait(self, timeout: float) -> None:
        """Until something was delivered, or the timeout (seconds)."""
        with self._changed:
            self._changed.wait(timeout)

    def take(self, request_id: str | None = None) -> GenerationOutput | None:
        """A finished result, removed from the books: of this request, or of whichever finished first."""
        with self._changed:
            if request_id is None:
                if not self._finished:
                    return None
                request_id = next(iter(self._finished))
            elif not self._requests[request_id].is_finished:
                return None
            collected = self._requests[request_id]
            self._forget(request_id)
            return self._build(request_id, collected)

    def take_within(self, request_id: str | None, timeout: float | None) -> GenerationOutput | None:
        """Like take, waiting up to `timeout` seconds (None: for ever) for another thread's steps."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            found = self.take(request_id)
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            self.wait(min(left, 1.0))

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._finished.pop(request_id, None)

    def _build(self, request_id: str, collected: _Collected) -> GenerationOutput:
        outputs = tuple(
            GenerationOutput(
                request_id=request_id,
                token_ids=tuple(choice.token_ids),
                finish_reason=choice.finish_reason or FinishReason.ERROR,
                num_prompt_tokens=collected.num_prompt_tokens,
                num_cached_tokens=choice.num_cached_tokens,
                logprobs=tuple(choice.logprobs) if collected.wants_logprobs else None,
                error=choice.error,
            )
            for choice in collected.choices
        )
        if len(outputs) == 1:
            return outputs[0]
        first = outputs[0]
        return GenerationOutput(
            request_id=request_id,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens,
            logprobs=first.logprobs,
            error=first.error,
            choices=outputs,
        )
