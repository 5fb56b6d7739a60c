"""Runs an engine in a thread of its own, for callers in any thread.

It has the calls of Transformers' ContinuousBatchingManager. The thread owns the engine: callers
leave requests and cancellations in an inbox, and the thread takes them between two steps. One
condition guards all state that callers see. Tokens are collected by `requests/results.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.own.direct import request_arguments as arguments
from tokenmill_worker.engines.own.direct.results import RequestOutput, ResultHandler, Results
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.errors import EngineError
from tokenmill_worker.engines.own.execution.warm_up import warm_up

log = logging.getLogger(__name__)


class ContinuousBatchingManager:
    """Accepts requests from any thread and steps the engine in one of its own.

    A result is returned once. The outputs of a streaming request go to `request_id_iter` or to
    `get_result` with its id, a handled one's to its handler; all others go to whoever asks first.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams | None = None,
        seed: int | None = None,
        max_queue_size: int = 0,
    ) -> None:
        """Wrap an engine that nobody else steps; its owner closes it.

        Args:
            params: Where a request names none.
            seed: Each request without a seed, and each of its choices, gets one of its own from it.
            max_queue_size: Most requests that wait for the engine to take them; 0: no limit.
        """
        self._engine = engine
        self._params = params or SamplingParams()
        self._seeds = itertools.repeat(None) if seed is None else arguments.seeds(seed)
        self._max_queue_size = max_queue_size
        self._results = Results()
        self._changed = self._results.changed
        self._inbox: list[GenerationRequest] = []
        self._cancelled: list[str] = []
        self._ids = itertools.count()
        self._pausing: list[int] = []  # the threads inside of pause()
        self._is_over = False  # whether the thread has run its last step
        self._is_parked = True  # whether the thread is outside of a step, and none is in flight
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    # ── the thread ──

    def start(self) -> None:
        """Start the thread; with a running one, do nothing. Raises EngineError after a failure."""
        with self._changed:
            self._results.raise_failure()
            if self.is_running():
                return
            self._is_stopping = self._is_over = False
            self._thread = threading.Thread(target=self._run, name="engine-manager", daemon=True)
            self._thread.start()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        return self._results.failure is not None

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Accept nothing more and end the thread when all requests, and all pauses, have ended.

        Args:
            block: wait for that, at most `timeout` seconds.
            timeout: in seconds; None: no limit.
            keep_for_next_session: no effect, as the engine belongs to its model, which keeps it.
            hard_stop: cancel what has not ended.

        Raises:
            EngineError: this thread is inside of pause().
        """
        with self._changed:
            if threading.get_ident() in self._pausing:
                raise EngineError("the manager is paused: leave pause() before stop()")
            self._is_stopping = True
            if hard_stop:
                self._cancelled += self._results.unfinished_ids()
            self._changed.notify_all()
        if block:
            self.join(timeout)

    def destroy(self) -> None:
        """Stop. The engine stays with its model; `BatchedModel.close` releases its memory."""
        self.stop()

    def warmup(self) -> None:
        """Run steps that compile kernels and capture CUDA graphs; a running manager pauses."""
        with self.pause() if self.is_running() else contextlib.nullcontext():
            warm_up(self._engine.runner, lambda message, _fraction: log.info("%s", message))

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Run no step inside the context; weights may change there. Requests continue after it.

        Cached prefixes are dropped at its end, because they belong to the old weights.

        Raises:
            EngineError: the manager has failed, fails before it pauses, or does not run.
        """
        thread = threading.get_ident()
        with self._changed:
            self._check_runs()
            self._pausing.append(thread)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._is_parked)
                self._check_runs()
            except BaseException:  # an interrupt too
                self._end_pause(thread)
                raise
        try:
            yield
        finally:
            with self._changed:
                if self._is_parked:
                    self._engine.scheduler.reset_prefix_cache()
                self._end_pause(thread)

    def _end_pause(self, thread: int) -> None:
        self._pausing.remove(thread)
        self._changed.notify_all()

    def _check_runs(self) -> None:
        self._results.raise_failure()
        if not self.is_running() or self._is_over:
            raise EngineError("the manager does not run: call start()")

    def __enter__(self) -> ContinuousBatchingManager:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(hard_stop=kind is not None)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            log.exception("The manager's loop failed; every waiting call raises EngineError")
            self._is_parked = self._is_over = True
            self._results.fail(error)

    def _step(self) -> bool:
        """Take the inbox, run one step and deliver its events; return False at the end."""
        engine = self._engine
        with self._changed:
            must_settle = bool(self._pausing) and not self._is_parked
        if must_settle:
            events = engine.settle()
            self._results.deliver(events)
            with self._changed:
                self._is_parked = True
                self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(self._may_step)
            if self._pausing:
                return True
            if not (self._inbox or self._cancelled or engine.has_work):
                self._is_parked = self._is_over = True
                return False
            self._is_parked = False
            inbox, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
            if self._max_queue_size:
                self._changed.notify_all()
        self._results.note_start([request.request_id for request in inbox])
        engine.submit(inbox)
        for request_id in cancelled:
            engine.cancel(request_id)
        events = engine.step()
        self._results.deliver(events)
        if not events and engine.waits_only:
            time.sleep(0.001)
        return True

    def _may_step(self) -> bool:
        if self._pausing:
            return not self._is_parked
        has_work = self._inbox or self._cancelled or self._engine.has_work
        return bool(has_work or self._is_stopping)

    # ── requests ──

    def add_request(
        self,
        input_ids: Seq[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Seq[int] | None = None,
        *,
        params: SamplingParams | None = None,
        **fields: Any,
    ) -> str:
        """Add one request and return its id. A request that cannot be served ends as FAILED, also
        one whose `input_ids` are no integers. Wait while the queue is full.

        Of several choices (`num_return_sequences`, or `n` of `params`) each has a result of its
        own: the first by the id, the others by the id and `__child#0`, `__child#1`, ….

        Args:
            record_timestamps: Note when each token comes.
            eos_token_id: Tokens that end the answer; a negative one is none.
            params: None: the manager's.
            fields: Single fields of SamplingParams, such as `temperature`, `top_k` and `top_p`.

        Raises:
            RequestError: An id is in use, or its result has not been taken.
            EngineError: The manager stops or has failed; or the queue is full, and the manager is
                not started or paused by this thread, so that nothing empties it.
        """
        sampling = arguments.sampling(params or self._params, max_new_tokens, eos_token_id, fields)
        ids, refusal = arguments.prompt_ids(input_ids)
        with self._changed:
            self._wait_for_room()
            name = request_id or self._new_id()
            requests = [
                GenerationRequest(request_id=each, prompt=Prompt(ids), params=one)
                for each, one in arguments.choices(name, sampling, self._seeds)
            ]
            self._results.open(requests, streaming, record_timestamps)
            if refusal is None:
                self._inbox += requests
                self._changed.notify_all()
            else:
                self._results.deliver([refusal.event(one.request_id) for one in requests])
            return name

    def _wait_for_room(self) -> None:
        self._check_accepts()
        while 0 < self._max_queue_size <= len(self._inbox):
            if self._thread is None or threading.get_ident() in self._pausing:
                raise EngineError(f"{len(self._inbox)} requests wait: max_queue_size is reached")
            self._changed.wait()
            self._check_accepts()

    def _check_accepts(self) -> None:
        self._results.raise_failure()
        if self._is_stopping:
            raise EngineError("the manager accepts no request: it is stopping")

    def add_requests(
        self,
        inputs: Seq[Seq[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **fields: Any,
    ) -> list[str]:
        """Add requests together, so that shared prefixes hit the cache; return ids in order.

        `fields` are further arguments of `add_request`, for each of them.
        """
        with self._changed:  # the thread takes them with one inbox, where it has no limit
            return [
                self.add_request(ids, None, max_new_tokens, streaming, record_timestamps, **fields)
                for ids in inputs
            ]

    def _new_id(self) -> str:
        return next(name for n in self._ids if (name := f"request-{n}") not in self._results)

    def cancel_request(self, request_id: str) -> None:
        """End a request. Its result has status CANCELLED; an unknown id is ignored."""
        with self._changed:
            if self._results.is_unfinished(request_id):
                self._cancelled.append(request_id)
                self._changed.notify_all()

    # ── results ──

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> RequestOutput | None:
        """Wait for this request's result (None: anyone's next) and return it; of a streaming
        request, its next output.

        Return None after `timeout` seconds, for an unknown id, or when nothing is left to wait for.

        Raises:
            EngineError: the loop has failed (its cause is attached) or was never started.
        """
        self._check_started()
        return self._results.get(request_id, timeout)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield results in the order of their ends, until none is left to wait for."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[RequestOutput]:
        """Yield one output per token, the last with the final status; the result is then taken.

        A reader that comes later goes on where the one before left. Without streaming=True, yield
        the result only. Raises EngineError as get_result does.
        """
        self._check_started()
        return self._results.request_id_iter(request_id)

    def register_result_handler(self, request_id: str, handler: ResultHandler) -> None:
        """Call `handler` with the result, and with each partial output of a streaming request.

        Registered in a coroutine, it is called in the event loop; else in the manager's thread,
        where it must return soon. Raises RequestError for an unknown id.
        """
        self._results.register_handler(request_id, handler)

    def _check_started(self) -> None:
        if self._thread is None:
            raise EngineError("the manager is not started: call start()")
