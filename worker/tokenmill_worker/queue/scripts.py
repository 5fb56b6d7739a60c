"""Loads the worker's Lua scripts, each joined with the helpers it needs. Encodes their arguments,
reads their replies as values, and translates their errors. The head of each file in lua/ lists its
keys, arguments, reply and errors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

from redis.exceptions import ResponseError

from tokenmill.errors import ConfigurationError
from tokenmill.transport.connect import SERVER_TROUBLE
from tokenmill.transport.refusals import translate
from tokenmill.transport.scripts import COMMON, Argument, Script, load_script
from tokenmill_schemas.codec import DecodeError, decode_status, encode
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import Delivery, FinishedJob, set_aside

_OWNERSHIP = ("tokenmill_worker.queue", "ownership")


def _script(*names: str) -> Script:
    return load_script(COMMON, _OWNERSHIP, *(("tokenmill_worker.queue", name) for name in names))


CLAIM = _script("options", "delivery", "sessions", "fair_queue", "claim")
# The hot path carries nothing that it does not use.
APPEND = load_script(("tokenmill_worker.queue", "append"))
FINISH = _script("finish")
RELEASE = _script("release")
HEARTBEAT = _script("options", "heartbeat")
RESIGN = _script("resign")

ALL = (CLAIM, APPEND, FINISH, RELEASE, HEARTBEAT, RESIGN)

OUTCOMES: Final = frozenset({"run", "cancelled", "expired", "dead"})


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """`cancelled`: jobs that a user wants stopped. `lost`: jobs to drop, because another worker has
    them or will, or because the server lost them. `is_replaced`: a process that started later sends
    heartbeats under this worker's name.
    """

    cancelled: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    is_replaced: bool = False


def options(**values: str | int) -> bytes:
    """Return the argument of a script that reads its options by name (options.lua)."""
    return encode(values)


def texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode("utf-8", "surrogateescape") for value in values]


def started_ms(status: bytes) -> int:
    """Return when the worker that wrote this status started, in Unix milliseconds; 0 if it cannot
    be decoded.
    """
    try:
        return decode_status(status).started_ms
    except DecodeError:
        return 0


def read_delivery(item: list[Any]) -> Delivery:
    """Read one claimed job. An unknown outcome (from a damaged state) counts as "dead". No
    text makes this raise.
    """
    (
        job_id,
        token,
        payload,
        deliveries,
        crashes,
        outcome,
        created,
        started,
        attempt,
        alone,
        log,
        redriven,
        log_end,
    ) = item
    word = outcome.decode("utf-8", "replace")
    return Delivery(
        job_id=job_id.decode("utf-8", "surrogateescape"),
        token=int(token),
        payload=payload,
        deliveries=int(deliveries),
        crashes=int(crashes),
        outcome=cast("Any", word if word in OUTCOMES else "dead"),
        log=tuple(log),
        created_ms=int(created),
        started_ms=int(started),
        attempt=int(attempt),
        alone=bool(alone),
        is_redriven=bool(redriven),
        log_end=int(log_end),
    )


log = logging.getLogger(__name__)


def finish_arguments(job: FinishedJob) -> tuple[Argument, ...]:
    try:
        return _encoded_end(job)
    except Exception as error:
        log.exception("Job %s ends without its answer: it cannot be encoded", job.job_id)
        return _encoded_end(set_aside(job, "acknowledge", error))


def _encoded_end(job: FinishedJob) -> tuple[Argument, ...]:
    usage = job.result.usage
    return (
        job.result.job_id,
        job.token,
        job.result.status.value,
        encode(job.result),
        encode(job.final_chunk),
        usage.prompt_tokens + usage.completion_tokens,
    )


class translated_errors:
    """Translates server and network errors into RedisUnavailable, and the refusal of chunks into
    ValueError: no later call would send them.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (*SERVER_TROUBLE, TimeoutError)):
            return
        if isinstance(error, RedisUnavailable):
            return
        if isinstance(error, ResponseError) and str(error).startswith("INVALID chunks"):
            raise ValueError(str(error)) from error
        trouble = translate(error)
        is_misconfigured = isinstance(trouble, ConfigurationError)
        raise RedisUnavailable(str(trouble), is_misconfigured=is_misconfigured) from error
