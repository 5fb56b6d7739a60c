"""From the keyword arguments of `submit` to a JobRequest: checked, named, fingerprinted, its cost estimated.

OpenAI's shapes are read in openai_forms.py; what makes a request bad is decided in schemas/validation.py, as it is for
the worker. It knows no connection.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec

from api_client.errors import InvalidRequest
from api_client.openai_forms import read_forms
from schemas.codec import encode, plain
from schemas.generation import SamplingParams
from schemas.job import JobRequest
from schemas.validation import MAX_MS, problems

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
    """A job's id. `is_new` is False when an idempotency key led to a job that was there already. `is_unserved` is True
    when no worker had ever served the queue.
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
    """Milliseconds and 4096ths of them since 1970, never the same twice and never backwards."""

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
    """A version 7 UUID: sorts by its time of creation, in one process by the order of calls (RFC 9562, 6.2, method 3).
    Jobs that came in one millisecond keep their order when a worker gives them back.
    """
    ticks = _ticks.next()
    random = int.from_bytes(os.urandom(8), "big") & (1 << 62) - 1
    value = (ticks >> 12) << 80 | 0x7 << 76 | (ticks & 0xFFF) << 64 | 0x2 << 62 | random
    digits = f"{value:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def build_request(arguments: Mapping[str, Any]) -> JobRequest:
    """Raises InvalidRequest, with everything that is wrong."""
    unknown = sorted(set(arguments) - _SAMPLING - _REQUEST - _OTHER_NAMES)
    if unknown:
        raise InvalidRequest([f"{name} is neither a job field nor a sampling parameter" for name in unknown])
    now_ms = round(time.time() * 1000)
    moments = {name: arguments.get(name) for name in ("deadline", "not_before")}
    try:
        given = _plain({name: arguments[name] for name in arguments if name not in moments})
        read_forms(given)
        given = {name: value for name, value in given.items() if value is not None}
        params = {name: value for name, value in given.items() if name in _SAMPLING}
        fields = {name: value for name, value in given.items() if name in _REQUEST}
        fields |= {"job_id": given.get("job_id") or new_job_id(), "created_ms": now_ms, "params": params}
        for name, origin_ms in (("deadline", now_ms), ("not_before", 0)):
            fields[f"{name}_ms"] = _moment_ms(name, moments[name], now_ms, origin_ms)
        request = msgspec.convert(fields, JobRequest)
    except InvalidRequest:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # msgspec's ValidationError is a ValueError
        raise InvalidRequest([str(error)]) from error
    return checked(request, is_decoded=True)


def checked(request: JobRequest, *, is_decoded: bool = False) -> JobRequest:
    """Raises InvalidRequest."""
    found = problems(request, is_decoded=is_decoded)
    if found:
        raise InvalidRequest(found)
    return request


def _moment_ms(name: str, value: Any, now_ms: int, origin_ms: int) -> int | None:
    """Seconds after the origin, a span of time from now on, or a moment."""
    if value is None:
        return None
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    if isinstance(value, timedelta):
        return now_ms + round(value.total_seconds() * 1000)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: a time is a number of seconds, a datetime or a timedelta, not {value!r}")
    if not math.isfinite(value * 1000) or abs(value * 1000) > 2 * MAX_MS:
        raise ValueError(f"{name} is no time: {value!r}")
    return origin_ms + round(value * 1000)


def _plain(value: Any) -> Any:
    """Structs inside become builtins, so that one conversion checks everything."""
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=plain)


def fingerprint(request: JobRequest) -> str:
    """Equal for requests that ask for the same: names, times and tracing do not count."""
    same = msgspec.structs.replace(
        request, job_id="", idempotency_key=None, created_ms=0, deadline_ms=None, not_before_ms=None, traceparent=None
    )
    return hashlib.blake2b(encode(same), digest_size=16).hexdigest()


def estimated_tokens(request: JobRequest) -> int:
    """What the job will probably cost, for fair sharing; settled with the truth when it ends."""
    if request.prompt_ids is not None:
        prompt = len(request.prompt_ids)
    elif request.messages is not None:
        prompt = sum(len(message.content) for message in request.messages) // _CHARS_PER_TOKEN
    else:
        prompt = len(request.prompt or "") // _CHARS_PER_TOKEN
    return prompt + request.params.n * (request.params.max_tokens or _GUESSED_ANSWER_TOKENS)
