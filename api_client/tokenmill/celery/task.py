"""Generation as a Celery task, for backends that use Celery already.

    from tokenmill.celery import generation_task
    generate = generation_task(app, queue="smollm2-135m-instruct", chat=True)

    generate.delay("Why is the sky blue?", max_tokens=64).get(timeout=60)["text"]
    chain(generate.s("Name a fruit."), generate.s(template="Praise this fruit: {text}")).delay()

`.delay` submits the job at once, from the calling process; the job's id is the task's. A task that
is called alone needs no Celery worker. Within a chain, a group or a chord, or with callbacks, a
Celery message with the same id is sent as well. The Celery worker that receives it waits briefly
for the job, retries later if it has not ended, and returns its result as for any task. Submitting
twice gives one job, so every step may be repeated.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NoReturn, TypeAlias

import celery
import celery.exceptions
import celery.result
from celery import states
from celery.backends.base import DisabledBackend
from celery.utils.time import maybe_iso8601, maybe_make_aware

from tokenmill.celery.values import GenerationFailed, fields_of, value_of
from tokenmill.client import Client
from tokenmill.errors import JobNotFound, QueueUnavailable, QueueUnserved, ResultTimeout
from tokenmill.operations.io_requests import ClientOptions
from tokenmill.operations.submit import new_job_id
from tokenmill_schemas.result import JobStatus

# Celery has no type annotations; these names replace its classes.
_AsyncResult: TypeAlias = Any
_BaseTask: Any = celery.Task
_BaseResult: Any = celery.result.AsyncResult

_TURN_S: Final = 5.0  # limit of one wait for a result
_PART_OF_MORE: Final = ("chain", "chord", "group_id", "root_id", "parent_id")
_STATES: Final = {
    JobStatus.SCHEDULED: states.PENDING,
    JobStatus.QUEUED: states.PENDING,
    JobStatus.RUNNING: states.STARTED,
}


class GenerationTask(_BaseTask):  # type: ignore[misc]
    """A task that submits jobs to one queue. Set its attributes in a subclass or with
    `generation_task`.

    `defaults` are fields of the job and sampling parameters that a call may override. `wait_s`:
    seconds for which a Celery worker waits for a job before it retries later; `pauses_s`: seconds
    until each retry. `returns`: "result" for a dictionary with text, usage and more, or "text".
    `chat`: send a text as a user's message, for models tuned for chat, instead of as the beginning
    of the text to continue.
    """

    url = "redis://localhost:6379/0"
    job_queue = ""  # the name `queue` belongs to Celery
    database: str | None = None
    prefix = "tm:"
    defaults: Mapping[str, Any] = {}
    returns: Literal["result", "text"] = "result"
    chat = False
    wait_s = 1.0
    pauses_s = (0.2, 0.5, 1.0, 2.0, 5.0)
    # limit of the wait in a queue that no worker has ever served; None: none
    unserved_s: float | None = 120.0

    abstract = True
    max_retries = None
    acks_late = True
    reject_on_worker_lost = True

    def __init__(self) -> None:
        self._clients: dict[int, Client] = {}
        self._opening = threading.Lock()

    @property
    def client(self) -> Client:
        """The client of this process. A forked Celery worker must not share its parent's
        connections.
        """
        with self._opening:
            if os.getpid() not in self._clients:
                options = ClientOptions(unserved_s=self.unserved_s)
                self._clients[os.getpid()] = Client(
                    self.url,
                    queue=self.job_queue,
                    database=self.database,
                    prefix=self.prefix,
                    options=options,
                )
            return self._clients[os.getpid()]

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> _AsyncResult:
        """Submit the job. `countdown` and `eta` set its `not_before`, and `expires` its `deadline`.
        Raises the exceptions of `submit`.
        """
        is_alone = not (
            task_id or link or link_error or any(options.get(name) for name in _PART_OF_MORE)
        )
        task_id = task_id or new_job_id()
        if not self._get_app().conf.task_always_eager and not options.get("retries"):
            self._submit(task_id, args or (), kwargs or {}, options)
            if is_alone:
                return self.AsyncResult(task_id)
        return super().apply_async(
            args, kwargs, task_id, producer, link, link_error, shadow, **options
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the job's result, in a Celery worker. Retry later if the job has not ended or the
        queue's server is unreachable.

        A call without a message (eager, `generate("x")`, and each item of `map`, `starmap` and
        `chunks`) submits a job of its own and waits for it, because no retry would come.
        """
        job_id = self.request.id or new_job_id()
        has_message = not (self.request.is_eager or self.request.called_directly)
        if not has_message:
            self._submit(job_id, args, kwargs, {})
        try:
            result = self.client.result(job_id, timeout=self.wait_s if has_message else None)
        except (ResultTimeout, QueueUnavailable) as error:
            if not has_message:
                raise
            if isinstance(error, ResultTimeout):
                self.check_served(job_id, self._waited_s())
            pause_s = self.pauses_s[min(self.request.retries, len(self.pauses_s) - 1)]
            raise self.retry(countdown=pause_s, throw=False) from None
        except JobNotFound:  # the queue has lost the job, or it was never submitted
            with contextlib.suppress(QueueUnavailable):
                self._submit(job_id, args, kwargs, {})
            raise self.retry(countdown=self.pauses_s[0], throw=False) from None
        if result.status is JobStatus.CANCELLED and has_message:
            self._end_as_revoked(job_id)
        return value_of(result, self.returns)

    def check_served(self, job_id: str, waited_s: float) -> None:
        """Raise QueueUnserved if the job has waited too long in a queue that no worker has ever
        served.
        """
        if self.unserved_s is not None and waited_s >= self.unserved_s and not self._is_served():
            raise QueueUnserved(self.job_queue, job_id)

    def _is_served(self) -> bool:
        """Return whether a worker has ever served the queue; True if the server cannot be asked."""
        try:
            return self.client.is_served()
        except QueueUnavailable:
            return True

    def _waited_s(self) -> float:
        """Return the seconds that the Celery task has waited and paused so far."""
        last = len(self.pauses_s) - 1
        return sum(
            self.wait_s + self.pauses_s[min(turn, last)] for turn in range(self.request.retries)
        )

    def _end_as_revoked(self, job_id: str) -> NoReturn:
        """Store REVOKED for the task and for the tasks after it in its chain. Raises Celery's
        Ignore, so that the state is kept.
        """
        request = self.request
        self.backend.mark_as_failure(
            job_id, _revoked(job_id), request=request, state=states.REVOKED
        )
        raise celery.exceptions.Ignore

    def AsyncResult(self, task_id: str, **kwargs: Any) -> GenerationResult:
        """Return a result that reads the job's own state. Celery prescribes the name."""
        return GenerationResult(
            task_id, task=self, backend=self.backend, task_name=self.name, app=self._get_app()
        )

    def _submit(
        self, task_id: str, args: Any, kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        fields = fields_of(args, {**self.defaults, **kwargs}, chat=self.chat)
        countdown = options.get("countdown")
        if options.get("eta"):
            fields["not_before"] = self._moment(options["eta"])
        elif countdown is not None:
            is_number = isinstance(countdown, int | float)
            fields["not_before"] = timedelta(seconds=countdown) if is_number else countdown
        if options.get("expires") is not None:
            fields["deadline"] = self._moment(options["expires"])
        self.client.submit(job_id=task_id, idempotency_key=f"celery:{task_id}", **fields)

    def _moment(self, given: Any) -> Any:
        """Parse a time as Celery does: ISO 8601 texts are accepted, and a time without a zone is in
        Celery's zone, not the machine's.
        """
        with contextlib.suppress(ValueError):  # an unparsable text is rejected by `submit`
            given = maybe_iso8601(given) if isinstance(given, str) else given
        return (
            maybe_make_aware(given, self._get_app().timezone)
            if isinstance(given, datetime)
            else given
        )


class GenerationResult(_BaseResult):  # type: ignore[misc]
    """Celery's AsyncResult, which also reads the job's state: it is more detailed and earlier than
    the result backend's.
    """

    def __init__(self, task_id: str, *, task: GenerationTask, **kwargs: Any) -> None:
        super().__init__(task_id, **kwargs)
        self._task = task

    def get(
        self,
        timeout: float | None = None,
        propagate: bool = True,
        interval: float = 0.2,
        no_ack: bool = True,
        follow_parents: bool = True,
        callback: Any = None,
        on_message: Any = None,
        on_interval: Any = None,
        disable_sync_subtasks: bool = True,
        **_states: Any,
    ) -> Any:
        """Wait for the task and return its value. Raises GenerationFailed, and Celery's
        TaskRevokedError and TimeoutError.
        """
        if disable_sync_subtasks:
            celery.result.assert_will_not_block()
        started = time.monotonic()
        deadline = None if timeout is None else started + timeout
        while not self.ready():
            if follow_parents and propagate and self.parent is not None:
                self._maybe_reraise_parent_error()
            left_s = _TURN_S if deadline is None else min(_TURN_S, deadline - time.monotonic())
            if left_s <= 0:
                raise celery.exceptions.TimeoutError(f"job {self.id} is not over yet")
            if on_interval is not None:
                on_interval()
            self._task.check_served(self.id, time.monotonic() - started)
            self._wait(left_s, interval)
        return self.maybe_throw(propagate=propagate, callback=callback)

    def revoke(self, *_: Any, **__: Any) -> None:
        """Cancel the job, waiting or running. Its state becomes REVOKED, and the tasks after it in
        a chain do not run.
        """
        self._task.client.cancel(self.id)

    def _wait(self, seconds: float, interval: float) -> None:
        try:
            self._task.client.result(self.id, timeout=seconds)
        except ResultTimeout:
            return
        except JobNotFound:  # not submitted before the tasks ahead of it have ended
            time.sleep(min(seconds, interval))

    def _get_task_meta(self) -> dict[str, Any]:
        if self._cache is None:
            kept = (
                {}
                if isinstance(self.backend, DisabledBackend)
                else self.backend.get_task_meta(self.id)
            )
            known = kept if kept.get("status") in states.READY_STATES else self._job_meta() or kept
            return self._maybe_set_cache(known or {"status": states.PENDING, "result": None}) or {}
        cached: dict[str, Any] = self._cache
        return cached

    def _job_meta(self) -> dict[str, Any] | None:
        client = self._task.client
        try:
            info = client.status(self.id)
            if not info.status.is_final:
                return {"status": _STATES[info.status], "result": None}
            result = client.result(self.id, timeout=_TURN_S)
        except (JobNotFound, ResultTimeout):
            return None
        meta = {"task_id": self.id, "traceback": None, "children": []}
        if result.status is JobStatus.CANCELLED:
            return {**meta, "status": states.REVOKED, "result": _revoked(self.id)}
        try:
            return {
                **meta,
                "status": states.SUCCESS,
                "result": value_of(result, self._task.returns),
            }
        except GenerationFailed as error:
            return {**meta, "status": states.FAILURE, "result": error}


def _revoked(job_id: str) -> Exception:
    error: Exception = celery.exceptions.TaskRevokedError(f"job {job_id} was cancelled")
    return error


def generation_task(
    app: Any, *, queue: str, name: str = "tokenmill.generate", **attributes: Any
) -> GenerationTask:
    """Register and return a task. `attributes`: url, database, prefix, defaults, chat, wait_s, or
    any of Celery's own.
    """
    kind = type(
        "GenerationTask",
        (GenerationTask,),
        {"job_queue": queue, "name": name, "abstract": False, **attributes},
    )
    task: GenerationTask = app.register_task(kind())
    return task
