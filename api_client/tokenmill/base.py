"""The parts that Client and AsyncClient share: options, building of requests, and the database."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tokenmill.errors import (
    ClientClosed,
    ConfigurationError,
    InvalidRequest,
    QueueUnserved,
)
from tokenmill.openai.form_values import FormError
from tokenmill.operations.io_requests import ClientOptions, Operation, QueueContext, ServerTime
from tokenmill.operations.submit import (
    JobHandle,
    build_request,
    checked,
    has_relative_times,
)
from tokenmill.sql.look_ups import LookUps
from tokenmill.transport.connect import parse_url
from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobResult

if TYPE_CHECKING:
    from tokenmill.sql import SqlResults

log = logging.getLogger(__name__)


class ClientBase:
    """The common part of both clients. No connection is opened before the first call."""

    def __init__(
        self,
        url: str,
        queue: str,
        database: str | SqlResults | None,
        prefix: str,
        options: ClientOptions,
    ) -> None:
        self.keys = Keys(checked_queue(queue), prefix)
        self._results = None if isinstance(database, str | None) else database
        self._shares_results = self._results is not None
        where = database if isinstance(database, str | None) else database.url
        for what, text in (("URL", url), ("key prefix", prefix), ("database URL", where or "")):
            _check_unicode(f"the {what}", text)
        self._options = options
        self._context = QueueContext(self.keys, options)
        self._database = where
        self._opening = threading.Lock()
        self.look_ups = LookUps(self.look_up)
        self.clock = ServerClock()
        self.is_closed = False
        self._has_warned = False
        publish = "SPUBLISH" if parse_url(url).is_cluster else "PUBLISH"
        self.script_head = (self.keys.meta, self.keys.base, publish)

    @property
    def queue(self) -> str:
        return self.keys.queue

    @property
    def has_database(self) -> bool:
        return self._database is not None

    @property
    def database(self) -> str | None:
        """The URL of the database; None if there is none."""
        return self._database

    @property
    def context(self) -> QueueContext:
        """The keys and limits of the queue, for operations passed to `perform`."""
        return self._context

    def look_up(self, job_id: str) -> JobResult | None:
        """Return a job's result from the database; None without a database or a row. Raises
        ClientClosed.
        """
        if self._database is None:
            return None
        with self._opening:
            check_open(self)
            if self._results is None:
                from tokenmill.sql import SqlResults  # SQLAlchemy is an extra

                self._results = SqlResults(self._database)
            results = self._results
        found: JobResult | None = results.get(job_id)
        return found

    def _close_results(self) -> None:
        self.look_ups.close()
        with self._opening:
            if self._results is not None and not self._shares_results:
                self._results.close()
            self._results = None

    def _noted(self, handles: list[JobHandle]) -> list[JobHandle]:
        """Return the handles. Warn once per client if no worker has ever served the queue."""
        if handles and handles[-1].is_unserved and not self._has_warned:
            self._has_warned = True
            trouble = QueueUnserved(self.queue, handles[-1])
            if self._options.on_trouble is not None:
                self._options.on_trouble(trouble)
            else:
                log.warning("%s", trouble)
        return handles

    def _requests(
        self, jobs: Iterable[JobRequest | Mapping[str, Any]]
    ) -> Operation[list[JobRequest]]:
        """Build requests. The server is asked for its time only if relative times need it, and an
        invalid job is refused before.
        """
        jobs = list(jobs)
        requests = self._built(jobs)
        if not self.clock.is_fresh and any(
            isinstance(job, Mapping) and has_relative_times(job) for job in jobs
        ):
            yield ServerTime()
            requests = self._built(jobs)
        return requests

    def _built(self, jobs: Iterable[JobRequest | Mapping[str, Any]]) -> list[JobRequest]:
        now_ms = self.clock.now_ms()
        try:
            return [
                checked(job) if isinstance(job, JobRequest) else build_request(job, now_ms)
                for job in jobs
            ]
        except FormError as error:  # internal: it has the place that a bulk file's error names
            raise InvalidRequest(error.problems) from None


def one_job(
    request: JobRequest | None, arguments: Mapping[str, Any]
) -> JobRequest | Mapping[str, Any]:
    """Return the job that `submit` was given in either form."""
    if request is None:
        return arguments
    if arguments:
        raise TypeError("give a JobRequest or its fields, not both")
    return request


def checked_queue(name: str) -> str:
    """Return the name of a queue. Raises ConfigurationError if it is not a valid name."""
    if not name or any(letter in name for letter in "{} \t\r\n"):
        raise ConfigurationError(
            f"a queue's name must not be empty, nor contain braces or white space: {name!r}"
        )
    _check_unicode("a queue's name", name)
    return name


def _check_unicode(what: str, text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigurationError(f"{what} holds a lone surrogate, which is no Unicode character")


def check_open(client: ClientBase) -> None:
    """Raise ClientClosed if the client has been closed."""
    if client.is_closed:
        raise ClientClosed
