"""Results of an engine's requests, waited for from any thread.

One condition guards everything. A result is taken once: by `request_id_iter` or by `get` with its
id for a streaming request, by its handler where there is one, else by whoever asks first.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.engine.errors import EngineError, why
from tokenmill_worker.engine.requests.outputs import Outputs
from tokenmill_worker.engine.types import (
    GenerationOutput,
    GenerationRequest,
    RequestError,
    TokenEvent,
)

log = logging.getLogger(__name__)


class RequestStatus(StrEnum):
    """State of a request whose output is read."""

    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All that a request has generated so far. `logprobs` is None unless it was asked for."""

    request_id: str
    generated_tokens: tuple[int, ...]
    status: RequestStatus
    logprobs: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0

    def is_finished(self) -> bool:
        return self.status is not RequestStatus.DECODING


ResultHandler = Callable[[RequestOutput], None]


class Results:
    """Outputs of requests until they are taken; safe in any thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self._outputs = Outputs()
        self._streaming: set[str] = set()
        self._handlers: dict[str, ResultHandler] = {}
        self._ready: dict[str, None] = {}  # finished results that anyone may take, in order
        self._awaited: dict[str, int] = {}  # number of callers that wait for an id
        self._num_open = 0  # requests that anyone may take and nobody has taken

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._outputs

    def open(self, request: GenerationRequest, streaming: bool) -> None:
        """Collect a request. Raises RequestError if its id is in use."""
        name = request.request_id
        if name in self._outputs:
            raise RequestError(f"request id {name!r} is already in use")
        self._outputs.open(name, len(request.prompt_ids), 1, request.params.wants_logprobs)
        if streaming:
            self._streaming.add(name)
        else:
            self._num_open += 1

    def unfinished_ids(self) -> list[str]:
        return self._outputs.unfinished_ids()

    def is_unfinished(self, request_id: str) -> bool:
        """Return whether the request is known and has not ended."""
        return request_id in self._outputs and not self._outputs.is_finished(request_id)

    def deliver(self, events: list[TokenEvent]) -> None:
        """Store events, give handlers theirs and wake the callers."""
        if not events:
            return
        with self.changed:
            self._outputs.deliver(events)
            for request_id in {event.request_id: None for event in events}:
                if request_id not in self._outputs:
                    continue
                if request_id in self._handlers:
                    self._handle(request_id)
                elif request_id not in self._streaming and self._outputs.is_finished(request_id):
                    self._ready[request_id] = None
            self.changed.notify_all()

    def _handle(self, request_id: str) -> None:
        handler = self._handlers[request_id]
        is_finished = self._outputs.is_finished(request_id)
        if not (is_finished or request_id in self._streaming):
            return
        output = self._outputs.peek(request_id)
        if is_finished:
            self._forget(request_id)
        try:
            handler(_output_of(output, is_finished))
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
        """Wait for this request's result (None: anyone's next) and return it.

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
            if name is None or name not in self._outputs or not self._outputs.is_finished(name):
                if self._is_owed(request_id):
                    self.raise_failure()
                return None
            output = self._outputs.peek(name)
            self._forget(name)
            self.changed.notify_all()
            return _output_of(output, True)

    def _can_answer(self, request_id: str | None) -> bool:
        if self.failure is not None or not self._is_owed(request_id):
            return True
        if request_id is None:
            return self._next_ready() is not None
        return self._outputs.is_finished(request_id)

    def _is_owed(self, request_id: str | None) -> bool:
        return self._num_open > 0 if request_id is None else request_id in self._outputs

    def _next_ready(self) -> str | None:
        return next((name for name in self._ready if name not in self._awaited), None)

    def _leave(self, request_id: str | None) -> None:
        if request_id is not None:
            self._awaited[request_id] -= 1
            if not self._awaited[request_id]:
                del self._awaited[request_id]

    def _forget(self, request_id: str) -> None:
        self._outputs.discard(request_id)
        self._ready.pop(request_id, None)
        if request_id in self._streaming:
            self._streaming.discard(request_id)
        elif self._handlers.get(request_id) is None:
            self._num_open -= 1
        self._handlers.pop(request_id, None)

    def request_id_iter(self, request_id: str) -> Iterator[RequestOutput]:
        """Yield one output per token, the last with the final status; the result is then taken.

        Without streaming=True, yield the result only. Raises EngineError if the loop has failed.
        """
        shown = 0
        while True:
            with self.changed:
                if request_id not in self._streaming:
                    break
                self.changed.wait_for(functools.partial(self._has_news, request_id, shown))
                if request_id not in self._outputs:
                    return
                output = self._outputs.peek(request_id)
                is_finished = self._outputs.is_finished(request_id)
                if is_finished:
                    self._forget(request_id)
                elif len(output.token_ids) == shown:
                    self.raise_failure()
            yield from _chunks(output, shown, is_finished)
            shown = len(output.token_ids)
            if is_finished:
                return
        result = self.get(request_id)
        if result is not None:
            yield result

    def _has_news(self, request_id: str, shown: int) -> bool:
        return (
            self.failure is not None
            or request_id not in self._outputs
            or self._outputs.is_finished(request_id)
            or self._outputs.num_tokens(request_id) > shown
        )

    def register_handler(self, request_id: str, handler: ResultHandler) -> None:
        """Call `handler` with the result, and with each partial output of a streaming request.

        In a coroutine it is called in the event loop, otherwise in the manager's thread, where it
        must return soon. Raises RequestError for an unknown id.
        """
        call = _in_running_loop(handler)
        with self.changed:
            if request_id not in self._outputs:
                raise RequestError(f"request id {request_id!r} is not known")
            if request_id not in self._streaming and request_id not in self._handlers:
                self._num_open -= 1
            self._handlers[request_id] = call
            if self._outputs.is_finished(request_id):
                self._handle(request_id)
            self.changed.notify_all()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the loop has failed: {why(self.failure)}") from self.failure


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


def _output_of(found: GenerationOutput, is_finished: bool) -> RequestOutput:
    status = _STATUS.get(found.finish_reason, RequestStatus.FINISHED)
    return RequestOutput(
        request_id=found.request_id,
        generated_tokens=found.token_ids,
        status=status if is_finished else RequestStatus.DECODING,
        logprobs=None if found.logprobs is None else tuple(one.logprob for one in found.logprobs),
        finish_reason=found.finish_reason if is_finished else None,
        error=found.error,
        num_cached_tokens=found.num_cached_tokens,
    )


def _chunks(found: GenerationOutput, shown: int, is_finished: bool) -> Iterator[RequestOutput]:
    """Yield one output per token behind `shown`; if the request has ended, at least one."""
    count = len(found.token_ids)
    for stop in range(shown + 1, count + (not is_finished)):
        part = msgspec.structs.replace(found, token_ids=found.token_ids[:stop])
        if found.logprobs is not None:
            part = msgspec.structs.replace(part, logprobs=found.logprobs[:stop])
        yield _output_of(part, False)
    if is_finished:
        yield _output_of(found, True)
