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
from dataclasses import dataclass, field
from enum import IntEnum

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.engine.errors import EngineError, why
from tokenmill_worker.engine.requests.outputs import Outputs
from tokenmill_worker.engine.types import RequestError

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
    """Describes a request whose result nobody has taken; `Outputs` has its tokens."""

    prompt_ids: list[int]
    is_streaming: bool
    created_time: float
    timestamps: list[float] | None
    handler: ResultHandler | None = None
    num_shown: int = 0  # tokens of a streaming request that somebody has been given
    started: float = -1
    ended: float = -1

    @property
    def is_anyones(self) -> bool:
        """May whoever asks first take the result?"""
        return not self.is_streaming and self.handler is None


class Results:
    """Outputs of requests until they are taken; safe in any thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self._outputs = Outputs()
        self._requests: dict[str, _Open] = {}
        self._ready: dict[str, None] = {}  # finished results that anyone may take, in order
        self._awaited: dict[str, int] = {}  # number of callers that wait for an id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def open(self, request: GenerationRequest, streaming: bool, has_timestamps: bool) -> None:
        """Collect a request. Raises RequestError if its id is in use."""
        name = request.request_id
        if name in self._requests:
            raise RequestError(f"request id {name!r} is already in use")
        self._outputs.open(name, len(request.prompt_ids), 1, request.params.wants_logprobs)
        self._requests[name] = _Open(
            list(request.prompt_ids),
            streaming,
            time.perf_counter(),
            [] if has_timestamps else None,
        )

    def note_start(self, request_ids: list[str]) -> None:
        """Note that the engine has taken these requests."""
        now = time.perf_counter()
        with self.changed:
            for name in request_ids:
                if (found := self._requests.get(name)) is not None:
                    found.started = now

    def unfinished_ids(self) -> list[str]:
        return self._outputs.unfinished_ids()

    def is_unfinished(self, request_id: str) -> bool:
        """Return whether the request is known and has not ended."""
        return request_id in self._requests and not self._outputs.is_finished(request_id)

    def deliver(self, events: list[TokenEvent]) -> None:
        """Store events, give handlers theirs and wake the callers."""
        if not events:
            return
        now = time.perf_counter()
        with self.changed:
            self._outputs.deliver(events)
            for event in events:
                if (found := self._requests.get(event.request_id)) is not None:
                    if found.timestamps is not None:
                        found.timestamps += [now] * len(event.token_ids)
                    if event.finish_reason is not None:
                        found.ended = now
            for request_id in {event.request_id: None for event in events}:
                if (found := self._requests.get(request_id)) is None:
                    continue
                if found.handler is not None:
                    self._handle(request_id, found.handler)
                elif not found.is_streaming and self._outputs.is_finished(request_id):
                    self._ready[request_id] = None
            self.changed.notify_all()

    def _handle(self, request_id: str, handler: ResultHandler) -> None:
        is_finished = self._outputs.is_finished(request_id)
        if not (is_finished or self._requests[request_id].is_streaming):
            return
        output = self._output(request_id)
        if is_finished:
            self._forget(request_id)
        try:
            handler(output)
        except Exception:
            log.exception(
                "The result handler of request %s failed; the request goes on", request_id
            )

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
            output = None if name is None or name not in self._requests else self._take(name)
            if output is None and self._is_owed(request_id):
                self.raise_failure()
            return output

    def _can_answer(self, request_id: str | None) -> bool:
        if self.failure is not None or not self._is_owed(request_id):
            return True
        if request_id is None:
            return self._next_ready() is not None
        return self._has_news(request_id)

    def _has_news(self, request_id: str) -> bool:
        if self._outputs.is_finished(request_id):
            return True
        found = self._requests[request_id]
        return found.is_streaming and self._outputs.num_tokens(request_id) > found.num_shown

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

    def _take(self, request_id: str) -> RequestOutput | None:
        """Return what is due of a known request, and note that it was given; None if nothing is."""
        found, count = self._requests[request_id], self._outputs.num_tokens(request_id)
        is_finished = self._outputs.is_finished(request_id)
        if found.is_streaming and found.num_shown + is_finished < count:
            found.num_shown += 1
            return self._output(request_id, found.num_shown)
        if not is_finished:
            return None
        output = self._output(request_id)
        self._forget(request_id)
        self.changed.notify_all()
        return output

    def _forget(self, request_id: str) -> None:
        self._outputs.discard(request_id)
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
            if request_id not in self._requests:
                raise RequestError(f"request id {request_id!r} is not known")
            self._requests[request_id].handler = call
            if self._outputs.is_finished(request_id):
                self._handle(request_id, call)
            self.changed.notify_all()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the loop has failed: {why(self.failure)}") from self.failure

    def _output(self, request_id: str, num_tokens: int | None = None) -> RequestOutput:
        """Return what a request has so far; with `num_tokens`, as it was when it had so many."""
        known, found = self._requests[request_id], self._outputs.peek(request_id)
        is_whole = num_tokens is None and self._outputs.is_finished(request_id)
        status = _STATUS.get(found.finish_reason, RequestStatus.FINISHED)
        stamps = known.timestamps
        return RequestOutput(
            request_id=request_id,
            prompt_ids=known.prompt_ids,
            generated_tokens=list(found.token_ids[:num_tokens]),
            status=status if is_whole else RequestStatus.DECODING,
            logprobs=[one.logprob for one in (found.logprobs or ())[:num_tokens]],
            finish_reason=found.finish_reason if is_whole else None,
            error=found.error,
            num_cached_tokens=found.num_cached_tokens,
            created_time=known.created_time,
            lifespan=(known.started, known.ended if is_whole else -1),
            timestamps=None if stamps is None else stamps[:num_tokens],
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


_STATUS = {
    FinishReason.CANCELLED: RequestStatus.CANCELLED,
    FinishReason.ERROR: RequestStatus.FAILED,
}
