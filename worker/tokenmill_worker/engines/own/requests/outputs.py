"""Collects the engine's events for callers of the Engine object: growing outputs, streams, results.

Only requests added through the engine's own calls are collected; hosts forward events and collect
nothing. Each token is stored once, in the output of its choice, whether it is streamed or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines.own.types import GenerationOutput


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class _Collected:
    num_prompt_tokens: int
    choices: list[_Choice]
    wants_logprobs: bool

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)


class Outputs:
    """Tokens by request, until the result is taken.

    Not thread-safe, like the engine.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Collected] = {}
        self._finished: dict[str, None] = {}  # finished requests in the order of their ends

    def open(self, request_id: str, num_prompt_tokens: int, n: int, wants_logprobs: bool) -> None:
        choices = [_Choice() for _ in range(n)]
        self._requests[request_id] = _Collected(num_prompt_tokens, choices, wants_logprobs)

    def discard(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._finished.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def deliver(self, events: list[TokenEvent]) -> None:
        """Store events; events of requests that are not collected are ignored."""
        if not self._requests:
            return
        for event in events:
            collected = self._requests.get(event.request_id)
            if collected is not None:
                self._apply(collected, event)

    def _apply(self, collected: _Collected, event: TokenEvent) -> None:
        choice = collected.choices[event.choice]
        if choice.finish_reason is not None:
            return
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs or ()
        choice.prompt_logprobs += event.prompt_logprobs
        choice.num_cached_tokens = choice.num_cached_tokens or event.num_cached_tokens
        choice.preemptions = event.preemptions
        choice.finish_reason, choice.error, choice.error_code = (
            event.finish_reason,
            event.error,
            event.error_code,
        )
        if event.finish_reason is not None and collected.is_finished:
            self._finished[event.request_id] = None

    def is_finished(self, request_id: str) -> bool:
        return self._requests[request_id].is_finished

    def read(self, request_id: str, cursors: dict[int, int]) -> Iterator[TokenEvent]:
        """Yield one event per choice with what it got since the last call; advance the cursors.

        A cursor is the number of tokens read, or -1 after the end. Raises KeyError if the request
        is unknown.
        """
        collected = self._requests[request_id]
        for index, choice in enumerate(collected.choices):
            first, stop = cursors.get(index, 0), len(choice.token_ids)
            has_ended = choice.finish_reason is not None
            if first < 0 or (first == stop and not has_ended):
                continue
            cursors[index] = -1 if has_ended else stop
            yield TokenEvent(
                request_id=request_id,
                choice=index,
                token_ids=tuple(choice.token_ids[first:]),
                logprobs=tuple(choice.logprobs[first:]) if collected.wants_logprobs else None,
                finish_reason=choice.finish_reason,
                error=choice.error,
                error_code=choice.error_code,
                num_cached_tokens=0 if first else choice.num_cached_tokens,
                preemptions=choice.preemptions,
            )

    def take(self, request_id: str | None = None) -> GenerationOutput | None:
        """Return and remove the finished result of this request (None: of the first that finished).

        Return None if it is not finished.
        """
        if request_id is None:
            if not self._finished:
                return None
            request_id = next(iter(self._finished))
        elif not self._requests[request_id].is_finished:
            return None
        collected = self._requests[request_id]
        self.discard(request_id)
        return self._build(request_id, collected)

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
                prompt_logprobs=tuple(choice.prompt_logprobs),
            )
            for choice in collected.choices
        )
        return (
            outputs[0]
            if len(outputs) == 1
            else msgspec.structs.replace(outputs[0], choices=outputs)
        )
