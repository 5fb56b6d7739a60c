"""Builds a JobRequest from the arguments of `submit`, and submits it: one script call stores all
jobs of a group or none of them.

A request is validated, and gets an id, a fingerprint and an estimate of its cost. openai/forms.py
reads OpenAI's shapes. schemas/tokenmill_schemas/validation.py decides which requests are valid, for
the producer and the worker alike.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tokenmill.errors import (
    IdempotencyConflict,
    InvalidRequest,
    QueueFull,
    RateLimited,
)
from tokenmill.openai.forms import read_forms
from tokenmill.operations.io_requests import Operation, QueueContext, RunScript
from tokenmill.transport.scripts import SUBMIT, Argument, in_parts
from tokenmill_schemas.codec import as_str, encode
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import JobRequest, wire_version
from tokenmill_schemas.validation import MAX_MS, problems

_SAMPLING = frozenset(SamplingParams.__struct_fields__)
_REQUEST = frozenset(JobRequest.__struct_fields__) - {
    "job_id",
    "params",
    "created_ms",
    "deadline_ms",
    "not_before_ms",
    "v",
}
_OTHER_NAMES = frozenset({"job_id", "deadline", "not_before", "max_completion_tokens"})
_GUESSED_ANSWER_TOKENS = 256
_CHARS_PER_TOKEN = 4


class JobHandle(str):
    """The id of a submitted job.

    `is_new` is False if an idempotency key or id led to a job that existed already. `is_unserved`
    is True if no worker had ever served the queue.
    """

    __slots__ = ("is_new", "is_unserved")
    is_new: bool
    is_unserved: bool

    def __new__(cls, job_id: str, *, is_new: bool = True, is_unserved: bool = False) -> JobHandle:
        handle = super().__new__(cls, job_id)
        handle.is_new = is_new
        handle.is_unserved = is_unserved
        return handle


class _Ticks:
    """A clock that counts 4096ths of a millisecond since 1970. Each reading is larger than the one
    before.
    """

    def __init__(self) -> None:
        self._last = 0
        self._turn = threading.Lock()

    def next(self) -> int:
        milliseconds, rest = divmod(time.time_ns(), 1_000_000)
        now = milliseconds << 12 | (rest << 12) // 1_000_000
        with self._turn:
            self._last = max(now, self._last + 1)
            return self._last


_ticks = _Ticks()


def new_job_id() -> str:
    """Return a version 7 UUID (RFC 9562, 6.2, method 3).

    Ids sort by their time of creation; those of one process by the order of calls. So jobs created
    in the same millisecond keep their order when a worker returns them to the queue.
    """
    ticks = _ticks.next()
    random = int.from_bytes(os.urandom(8), "big") & (1 << 62) - 1
    value = (ticks >> 12) << 80 | 0x7 << 76 | (ticks & 0xFFF) << 64 | 0x2 << 62 | random
    digits = f"{value:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def as_score(continuations: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `submit` for a job that scores continuations. Raises InvalidRequest
    if there are none.
    """
    if not continuations:
        raise InvalidRequest(["continuations is empty; there is nothing to score"])
    return {"stream": False, **arguments, "continuations": continuations}


def has_relative_times(arguments: Mapping[str, Any]) -> bool:
    """Return whether a time among the arguments of `submit` counts from now."""
    deadline, not_before = arguments.get("deadline"), arguments.get("not_before")
    is_absolute = deadline is None or isinstance(deadline, datetime)
    return not is_absolute or isinstance(not_before, timedelta)


def build_request(arguments: Mapping[str, Any], now_ms: int | None = None) -> JobRequest:
    """Build a request from the arguments of `submit`. Raises InvalidRequest with every problem
    found.

    `now_ms`: the server's time, from which relative times count; None: this machine's.
    """
    now_ms = round(time.time() * 1000) if now_ms is None else now_ms
    unknown = sorted(set(arguments) - _SAMPLING - _REQUEST - _OTHER_NAMES)
    if unknown:
        raise InvalidRequest(
            [f"{name} is neither a job field nor a sampling parameter" for name in unknown]
        )
    moments = {name: arguments.get(name) for name in ("deadline", "not_before")}
    try:
        given = _plain({name: arguments[name] for name in arguments if name not in moments})
        read_forms(given)
        given = {name: value for name, value in given.items() if value is not None}
        params = {name: value for name, value in given.items() if name in _SAMPLING}
        fields = {name: value for name, value in given.items() if name in _REQUEST}
        fields |= {
            "job_id": given.get("job_id") or new_job_id(),
            "created_ms": now_ms,
            "params": params,
        }
        for name, origin_ms in (("deadline", now_ms), ("not_before", 0)):
            fields[f"{name}_ms"] = _moment_ms(name, moments[name], now_ms, origin_ms)
        request = msgspec.convert(fields, JobRequest)
    except InvalidRequest:
        raise
    # msgspec's ValidationError is a ValueError
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest([str(error)]) from error
    return checked(request, is_decoded=True)


def checked(request: JobRequest, *, is_decoded: bool = False) -> JobRequest:
    """Return the request, with the version that its fields need. Raises InvalidRequest if it is not
    valid.
    """
    found = problems(request, is_decoded=is_decoded)
    if found:
        raise InvalidRequest(found)
    version = wire_version(request)
    return request if version == 1 else msgspec.structs.replace(request, v=version)


def _moment_ms(name: str, value: Any, now_ms: int, origin_ms: int) -> int | None:
    """Return a time in Unix milliseconds; None without a value.

    A number is in seconds after `origin_ms`, a timedelta counts from now, and a datetime is taken
    as it is.
    """
    if value is None:
        return None
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    if isinstance(value, timedelta):
        return now_ms + round(value.total_seconds() * 1000)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{name}: a time is a number of seconds, a datetime or a timedelta, not {value!r}"
        )
    if not math.isfinite(value * 1000) or abs(value * 1000) > 2 * MAX_MS:
        raise ValueError(f"{name} is no time: {value!r}")
    return origin_ms + round(value * 1000)


def _plain(value: Any) -> Any:
    """Convert the structs inside a value to builtins, so that one conversion checks everything."""
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=as_str)


def fingerprint(request: JobRequest) -> str:
    """Return a hash that is equal for requests with the same content. The job's id, its idempotency
    key, its times, its trace context and its session do not count.
    """
    same = msgspec.structs.replace(
        request,
        job_id="",
        idempotency_key=None,
        created_ms=0,
        deadline_ms=None,
        not_before_ms=None,
        traceparent=None,
        session="",
    )
    return hashlib.blake2b(encode(same), digest_size=16).hexdigest()


def estimated_tokens(request: JobRequest) -> int:
    """Estimate the cost of a job in tokens, for fair sharing; replaced by the real cost when the
    job ends.
    """
    if request.prompt_ids is not None:
        prompt = len(request.prompt_ids)
    elif request.messages is not None:
        prompt = sum(message.num_chars for message in request.messages) // _CHARS_PER_TOKEN
    else:
        prompt = len(request.prompt or "") // _CHARS_PER_TOKEN
    if request.continuations:
        return prompt + sum(map(_guessed_length, request.continuations))
    return prompt + request.params.n * (request.params.max_tokens or _GUESSED_ANSWER_TOKENS)


def _guessed_length(given: str | tuple[int, ...]) -> int:
    return max(1, len(given) // (_CHARS_PER_TOKEN if isinstance(given, str) else 1))


SUBMIT_JOBS = 256
SUBMIT_BYTES = 1024 * 1024


def submit(context: QueueContext, requests: Sequence[JobRequest]) -> Operation[list[JobHandle]]:
    """Submit all requests in as few calls as their size allows. Each call stores all of its jobs or
    none.
    """
    handles: list[JobHandle] = []
    for part in in_parts(map(_submit_arguments, requests), SUBMIT_BYTES, SUBMIT_JOBS):
        arguments: list[Argument] = [
            context.options.queue_limit,
            round(context.options.idempotency_ttl_s * 1000),
        ]
        for item in part:
            arguments += item
        reply = yield RunScript(SUBMIT, tuple(arguments))
        handles += _read_submitted(context, reply, handles)
    return handles


def _submit_arguments(request: JobRequest) -> tuple[Argument, ...]:
    return (
        request.job_id,
        request.priority.value,
        request.tenant,
        fingerprint(request),
        request.idempotency_key or "",
        encode(request),
        request.created_ms,
        request.deadline_ms or 0,
        request.not_before_ms or 0,
        estimated_tokens(request),
        request.session,
    )


def _read_submitted(
    context: QueueContext, reply: list[bytes], accepted: Sequence[JobHandle]
) -> list[JobHandle]:
    """Return the handles of a reply. `accepted`: those of the calls before it."""
    word, *rest = (value.decode() for value in reply)
    if word == "large":
        raise InvalidRequest([f"the request has {rest[0]} bytes; the queue's limit is {rest[1]}"])
    if word == "full":
        raise QueueFull(context.keys.queue, int(rest[0]), int(rest[1]), accepted, rest[2])
    if word == "rate":
        raise RateLimited(rest[0], int(rest[1]) / 1000, accepted)
    if word == "name":
        raise InvalidRequest(["job_id must be a text of 1 to 255 bytes without control characters"])
    if word == "conflict":
        raise IdempotencyConflict(rest[0])
    is_unserved = len(rest) % 2 == 1  # "unserved" follows the jobs
    return [
        JobHandle(job_id, is_new=how == "new", is_unserved=is_unserved)
        for job_id, how in zip(rest[::2], rest[1::2], strict=False)
    ]
