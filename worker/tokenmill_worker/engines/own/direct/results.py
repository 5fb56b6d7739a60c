"""Results of an engine's requests, waited for from any thread.

One condition guards everything. A result is taken once: by its handler where there is one, else by
whoever asks first. The outputs of a streaming request come one per token, to `request_id_iter` or
`get` with its id; each of them is given once, whoever asks, so a reader may leave and another goes
on where it was.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import IntEnum

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import GenerationRequest, RequestError
from tokenmill_worker.engines.own.errors import EngineError, why

log = logging.getLogger(__name__)


class RequestStatus(IntEnum):
    """State of a request, with Transformers' names and order. From FINISHED on it has ended."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All that a request has generated so far.

    `logprobs` is empty unless it was asked for. Times are those of `time.perf_counter`, in seconds:
    `created_time`, when the request was added; `lifespan`, when the engine took it and when it
    ended (-1: not yet); `timestamps`, when each token came, if the request records them.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int]
    status: RequestStatus
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    created_time: float = 0.0
    lifespan: tuple[float, float] = (-1, -1)
    timestamps: list[float] | None = None

    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED


ResultHandler = Callable[[RequestOutput], None]


@dataclass(slots=True)
class _Open:
    """A request whose result nobody has taken, and what it has generated.

    Its lists only grow, so what they held at some time can be copied later, without the condition.
    """

    request_id: str
    prompt_ids: list[int]
    is_streaming: bool
    created_time: float
    timestamps: list[float] | None
    handler: ResultHandler | None = None
    num_shown: int = 0  # tokens of a streaming request that somebody has been given
    started: float = -1
    ended: float = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_anyones(self) -> bool:
        """Return whether whoever asks first may take the result."""
        return not self.is_streaming and self.handler is None

    @property
    def has_news(self) -> bool:
        return self.is_finished or (self.is_streaming and len(self.tokens) > self.num_shown)

    def append(self, event: TokenEvent, now: float) -> None:
        if self.is_finished:
            return
        self.tokens += event.token_ids
        self.logprobs += [one.logprob for one in event.logprobs or ()]
        if self.timestamps is not None:
            self.timestamps += [now] * len(event.token_ids)
        self.num_cached_tokens = self.num_cached_tokens or event.num_cached_tokens
        self.finish_reason, self.error = event.finish_reason, event.error
        if event.finish_reason is not None:
            self.ended = now

    def output(self, num_tokens: int | None) -> RequestOutput:
        """Return the result, or, with `num_tokens`, what the request had when it had so many."""
        is_result = num_tokens is None
        stamps = self.timestamps
        return RequestOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            generated_tokens=self.tokens[:num_tokens],
            status=self._end_status if is_result else RequestStatus.DECODING,
            logprobs=self.logprobs[:num_tokens],
            finish_reason=self.finish_reason if is_result else None,
            error=self.error if is_result else None,
            num_cached_tokens=self.num_cached_tokens,
            created_time=self.created_time,
            lifespan=(self.started, self.ended if is_result else -1),
            timestamps=None if stamps is None else stamps[:num_tokens],
        )

    @property
    def _end_status(self) -> RequestStatus:
        if self.finish_reason is FinishReason.CANCELLED:
            return RequestStatus.CANCELLED
        is_error = self.finish_reason is FinishReason.ERROR
        return RequestStatus.FAILED if is_error else RequestStatus.FINISHED


_Due = tuple[_Open, int | None]  # a request, and the number of tokens to show; None: the result


class Results:
    """Outputs of requests until they are taken; safe in any thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self._requests: dict[str, _Open] = {}
        self._ready: dict[str, None] = {}  # finished results that anyone may take, in order
        self._awaited: dict[str, int] = {}  # number of callers that wait for an id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def open(self, requests: Seq[GenerationRequest], streaming: bool, has_timestamps: bool) -> None:
        """Collect requests. Raises RequestError, and collects none, if one of the ids is in use."""
        names = [request.request_id for request in requests]
        for name in names:
            if name in self._requests:
                raise RequestError(f"request id {name!r} is already in use")
        now = time.perf_counter()
        for name, request in zip(names, requests, strict=True):
            stamps: list[float] | None = [] if has_timestamps else None
            prompt = list(request.prompt.token_ids)
            self._requests[name] = _Open(name, prompt, streaming, now, stamps)

    def note_start(self, request_ids: list[str]) -> None:
        """Note that the engine has taken these requests."""
        now = time.perf_counter()
        with self.changed:
            for name in request_ids:
                if (found := self._requests.get(name)) is not None:
                    found.started = now

    def unfinished_ids(self) -> list[str]:
        return [name for name, one in self._requests.items() if not one.is_finished]

    def is_unfinished(self, request_id: str) -> bool:
        """Return whether the request is known and has not ended."""
        found = self._requests.get(request_id)
        return found is not None and not found.is_finished

    def deliver(self, events: list[TokenEvent]) -> None:
        """Store events, wake the callers and give handlers theirs."""
        if not events:
            return
        now = time.perf_counter()
        due: list[tuple[ResultHandler, _Due]] = []
        with self.changed:
            for event in events:
                if (found := self._requests.get(event.request_id)) is not None:
                    found.append(event, now)
            for request_id in {event.request_id: None for event in events}:
                if (found := self._requests.get(request_id)) is None:
                    continue
                if found.handler is not None:
                    due += self._due_to_handler(found, found.handler)
                elif found.is_finished and not found.is_streaming:
                    self._ready[request_id] = None
            self.changed.notify_all()
        for handler, one in due:
            _handle(handler, one)

    def _due_to_handler(
        self, found: _Open, handler: ResultHandler
    ) -> list[tuple[ResultHandler, _Due]]:
        if found.is_finished:
            self._forget(found.request_id)
            return [(handler, (found, None))]
        return [(handler, (found, len(found.tokens)))] if found.is_streaming else []

    def fail(self, error: BaseException) -> None:
        """Let every waiting and later call raise EngineError with this cause."""
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    def get(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> RequestOutput | None:
        """Wait for this request's result (None: anyone's next) and return it; of a streaming
        request, its next output.

        Return None after `timeout` seconds, for an unknown id, or when nothing is left to wait for.

        Raises:
            EngineError: the loop has failed; its cause is attached.
        """
        with self.changed:
            if request_id is not None:
                self._awaited[request_id] = self._awaited.get(request_id, 0) + 1
            try:
                self.changed.wait_for(lambda: self._can_answer(request_id), timeout)
            finally:
                self._leave(request_id)
            name = self._next_ready() if request_id is None else request_id
            due = None if name is None or name not in self._requests else self._take(name)
            if due is None:
                if self._is_owed(request_id):
                    self.raise_failure()
                return None
        found, num_tokens = due
        return found.output(num_tokens)

    def _can_answer(self, request_id: str | None) -> bool:
        if self.failure is not None or not self._is_owed(request_id):
            return True
        if request_id is None:
            return self._next_ready() is not None
        return self._requests[request_id].has_news

    def _is_owed(self, request_id: str | None) -> bool:
        if request_id is None:
            return any(one.is_anyones for one in self._requests.values())
        return request_id in self._requests

    def _next_ready(self) -> str | None:
        return next((name for name in self._ready if name not in self._awaited), None)

    def _leave(self, request_id: str | None) -> None:
        if request_id is not None:
            self._awaited[request_id] -= 1
            if not self._awaited[request_id]:
                del self._awaited[request_id]

    def _take(self, request_id: str) -> _Due | None:
        """Return what is due of a known request, and note that it was given; None if nothing is."""
        found = self._requests[request_id]
        if found.is_streaming and found.num_shown + found.is_finished < len(found.tokens):
            found.num_shown += 1
            return found, found.num_shown
        if not found.is_finished:
            return None
        self._forget(request_id)
        self.changed.notify_all()
        return found, None

    def _forget(self, request_id: str) -> None:
        self._ready.pop(request_id, None)
        del self._requests[request_id]

    def request_id_iter(self, request_id: str) -> Iterator[RequestOutput]:
        """Yield one output per token, the last with the final status; the result is then taken.

        A reader that comes later goes on where the one before left. Without streaming=True, yield
        the result only. Raises EngineError if the loop has failed.
        """
        while (output := self.get(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_handler(self, request_id: str, handler: ResultHandler) -> None:
        """Call `handler` with the result, and with each partial output of a streaming request.

        In a coroutine it is called in the event loop, otherwise in the manager's thread, where it
        must return soon. Raises RequestError for an unknown id.
        """
        call = _in_running_loop(handler)
        with self.changed:
            if (found := self._requests.get(request_id)) is None:
                raise RequestError(f"request id {request_id!r} is not known")
            found.handler = call
            due = self._due_to_handler(found, call) if found.is_finished else []
            self.changed.notify_all()
        for one, output in due:
            _handle(one, output)

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the loop has failed: {why(self.failure)}") from self.failure


def _handle(handler: ResultHandler, due: _Due) -> None:
    found, num_tokens = due
    try:
        handler(found.output(num_tokens))
    except Exception:
        log.exception(
            "The result handler of request %s failed; the request goes on", found.request_id
        )


def _in_running_loop(handler: ResultHandler) -> ResultHandler:
    """Return a handler that runs in the caller's event loop; outside of one, the same handler."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return handler

    def call(output: RequestOutput) -> None:
        loop.call_soon_threadsafe(handler, output)

    return call
