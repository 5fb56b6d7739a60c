"""The parts that Client and AsyncClient share: options, building of requests, and the database."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import redis
from redis.exceptions import AuthenticationError, NoPermissionError

from tokenmill.errors import (
    ClientClosed,
    ConfigurationError,
    InvalidRequest,
    QueueUnavailable,
    QueueUnserved,
    TokenmillError,
    not_unicode,
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
from tokenmill.transport.connect import SERVER_TROUBLE, parse_url, server_words
from tokenmill.transport.refusals import write_refusal
from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobResult

if TYPE_CHECKING:
    from tokenmill.sql import SqlResults

log = logging.getLogger(__name__)
# redis-py's words: "Error 111 connecting to localhost:6379. Connection refused."
_NOT_CONNECTED = re.compile(r"Error (-?\d+) connecting to (\S+)\. ?(.*)", re.DOTALL)
TRANSLATED = (*SERVER_TROUBLE, UnicodeError)  # what `translate` takes


class ClientBase:
    """The common part of both clients. No connection is opened before the first call."""

    def __init__(
        self, url: str, queue: str, database: str | None, prefix: str, options: ClientOptions
    ) -> None:
        self.keys = Keys(checked_queue(queue), prefix)
        for what, text in (("URL", url), ("key prefix", prefix), ("database URL", database or "")):
            _check_unicode(f"the {what}", text)
        self._options = options
        self._context = QueueContext(self.keys, options)
        self._database = database
        self._results: SqlResults | None = None
        self._opening = threading.Lock()
        self._look_ups = LookUps(self.look_up)
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
        self._look_ups.close()
        with self._opening:
            if self._results is not None:
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


def translate(error: Exception) -> TokenmillError:
    """Return the client's exception for one of TRANSLATED.

    A user that the server rejects becomes ConfigurationError, and an argument that a script rejects
    (INVALID) or that cannot be encoded becomes InvalidRequest: waiting repairs neither. Every other
    error is trouble with the server and becomes QueueUnavailable.
    """
    if isinstance(error, UnicodeEncodeError):
        return not_unicode(error)
    if isinstance(error, UnicodeError):  # socket's, for labels that are empty or too long
        return ConfigurationError(f"the Redis URL's host is not the name of a host: {error}")
    source = error.__cause__ if isinstance(error, QueueUnavailable) else error
    if isinstance(source, (AuthenticationError, NoPermissionError)):
        refusal = ConfigurationError(f"Redis refuses this user: {server_words(source)}")
        refusal.__cause__ = source
        return refusal
    if isinstance(error, QueueUnavailable):
        return error
    if isinstance(error, redis.ResponseError) and str(error).startswith("INVALID "):
        return InvalidRequest([str(error).removeprefix("INVALID ")])
    trouble = QueueUnavailable(_unavailable(error, server_words(error)))
    trouble.__cause__ = error
    return trouble


def _unavailable(error: Exception, words: str) -> str:
    """Return one sentence: which server cannot be reached and why, or what the server answered."""
    if (refusal := write_refusal(error)) is not None:
        return refusal
    if isinstance(error, redis.ResponseError):
        return f"Redis answers with an error: {words}"
    refused = _NOT_CONNECTED.match(words)
    if refused is None:
        return f"cannot reach Redis: {words}"
    number, address, rest = refused.groups()
    is_system_error = int(number) > 0 and not rest.startswith("[SSL")  # TLS errors have number 1
    reason = os.strerror(int(number)) if is_system_error else rest.rstrip(".")
    return f"cannot reach Redis at {address}: {reason}"
