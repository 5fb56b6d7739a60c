"""Checks of a job request that need no model.

Pure functions. The producer runs them at submit and the worker at admission, so that both reject
the same requests with the same messages. Vocabulary and context length are checked elsewhere.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from tokenmill_schemas.chat_validation import chat_problems, chat_texts, json_texts, tool_problems
from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import SCHEMA_VERSION, JobRequest, RetryPolicy
from tokenmill_schemas.params_validation import MAX_CHOICES as MAX_CHOICES
from tokenmill_schemas.params_validation import encoded_size, id_problems
from tokenmill_schemas.params_validation import params_problems as params_problems
from tokenmill_schemas.size_limits import (
    MAX_FORMAT_CHARS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_PROMPT_IDS,
)
from tokenmill_schemas.webhook import redacted_url

# the width of the SQL columns: job id, model, tenant, idempotency key, batch id, previous id; and
# of a session's name
MAX_NAME_CHARS: Final = 255
MAX_METADATA_CHARS: Final = 4_096
MAX_URL_CHARS: Final = 2_048
MAX_ECHO: Final = 4 * 1024 * 1024
MAX_MS: Final = 2**53
WEEK_MS: Final = 7 * 24 * 3_600_000

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")

_TEXTS: Final = (
    "job_id", "model", "prompt", "tenant", "idempotency_key", "webhook", "traceparent", "batch_id",
    "previous_id", "session",
)  # fmt: skip

_NAMES: Final = (
    "job_id", "model", "tenant", "idempotency_key", "batch_id", "previous_id", "session",
)  # fmt: skip


def webhook_problem(url: str) -> str | None:
    """Return a sentence about a URL to which no webhook can be sent."""
    if len(url) <= MAX_URL_CHARS and _URL.fullmatch(url):
        return None
    return (
        f"webhook must be an http or https URL of at most {MAX_URL_CHARS} characters, not "
        f"{_short(redacted_url(url))}"
    )


def problems(
    request: JobRequest, now_ms: int | None = None, *, is_decoded: bool = False
) -> list[str]:
    """Return one sentence for each problem of a request, with the field and the value given; empty
    if there is none.

    Args:
        now_ms: Unix milliseconds. If given, a deadline before it is a problem too.
        is_decoded: the request was decoded from bytes or plain values, which has checked its types
        already.
    """
    try:
        request = request if is_decoded else _as_received(request)
    except msgspec.ValidationError as error:
        return [f"the request has a wrong type: {error}"]
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return [f"the request holds a value that cannot be sent: {error or type(error).__name__}"]
    found = [*_broken_text(request)]
    if found:  # such text cannot be encoded, so its size is unknown
        return found
    found += _version_problems(request)
    found += _name_problems(request)
    found += _prompt_problems(request)
    found += chat_problems(request)
    found += tool_problems(request)
    found += continuation_problems(request)
    found += _time_problems(request, now_ms)
    found += _retry_problems(request.retry)
    found += metadata_problems(request.metadata)
    found += params_problems(request.params)
    return found or _size_problems(request)


def _as_received(request: JobRequest) -> JobRequest:
    """Return the request as decoding would build it. Structs check their types only when they are
    decoded, not when they are built in Python. Raises the errors of decoding.
    """
    plain = msgspec.to_builtins(request, builtin_types=(bytes, bytearray, memoryview))
    return msgspec.convert(plain, JobRequest)


def _broken_text(request: JobRequest) -> Iterator[str]:
    for field, text in _texts(request):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            yield (
                f"{field} is not valid Unicode: a lone surrogate stands at character {error.start}"
            )


def _texts(request: JobRequest) -> Iterator[tuple[str, str]]:
    """Yield each text of the request, after the name of its field."""
    for field in _TEXTS:
        text = getattr(request, field)
        if text is not None:
            yield field, text
    yield "lora", request.params.lora
    yield from chat_texts(request)
    for i, stop in enumerate(request.params.stop):
        yield f"stop[{i}]", stop
    for i, given in enumerate(request.continuations):
        if isinstance(given, str):
            yield f"continuations[{i}]", given
    for key, value in request.metadata.items():
        yield "metadata", key
        yield "metadata", value
    wanted = request.params.response_format
    if wanted is not None:
        yield from (
            ("response_format", text) for text in (wanted.regex, wanted.grammar) if text is not None
        )
        for name in ("json_schema", "structural_tag"):
            for text in json_texts(getattr(wanted, name)):
                yield f"response_format.{name}", text


def _version_problems(request: JobRequest) -> Iterator[str]:
    if request.v > SCHEMA_VERSION:
        yield (
            f"the request needs version {request.v} of the wire format; this side reads up to "
            f"version {SCHEMA_VERSION}: update it"
        )


def _name_problems(request: JobRequest) -> Iterator[str]:
    if not request.job_id:
        yield "job_id must not be empty"
    names = {field: getattr(request, field) for field in _NAMES}
    for field, name in (names | {"lora": request.params.lora}).items():
        text = name or ""
        if len(text) > MAX_NAME_CHARS:
            yield f"{field} may have {MAX_NAME_CHARS} characters, not {len(text)}"
        elif _CONTROL.search(text):
            yield f"{field} must not contain control characters: {text!r}"
    if request.idempotency_key == "":
        yield "idempotency_key must not be empty; leave it out instead"
    if request.webhook is not None and (problem := webhook_problem(request.webhook)):
        yield problem
    if request.traceparent is not None and len(request.traceparent) > MAX_NAME_CHARS:
        yield f"traceparent may have {MAX_NAME_CHARS} characters, not {len(request.traceparent)}"


def _prompt_problems(request: JobRequest) -> Iterator[str]:
    given = [
        name for name in ("prompt", "messages", "prompt_ids") if getattr(request, name) is not None
    ]
    if len(given) != 1:
        yield (
            "exactly one of prompt, messages and prompt_ids must be given, not "
            f"{' and '.join(given) or 'none'}"
        )
        return
    if not getattr(request, given[0]):
        yield (
            f"{given[0]} is empty; it needs at least one "
            f"{'message' if given[0] == 'messages' else 'token'}"
        )
    if request.messages is not None and len(request.messages) > MAX_MESSAGES:
        yield f"messages may have {MAX_MESSAGES} entries, not {len(request.messages)}"
    if request.prompt_ids is not None and len(request.prompt_ids) > MAX_PROMPT_IDS:
        yield f"prompt_ids may have {MAX_PROMPT_IDS} ids, not {len(request.prompt_ids)}"
    yield from id_problems("prompt_ids", request.prompt_ids or ())
    if request.params.echo:
        yield from _echo_problems(request)


def _echo_problems(request: JobRequest) -> Iterator[str]:
    if request.messages is not None:
        yield "echo needs prompt or prompt_ids"
    if request.params.response_format is not None:
        yield "echo cannot be given with response_format: the prompt need not have that form"
    size = request.params.n * len(request.prompt or request.prompt_ids or ())
    if size > MAX_ECHO:
        yield (
            f"echo repeats the prompt in each answer: {size} characters or ids in all, where "
            f"{MAX_ECHO} are allowed"
        )


def _time_problems(request: JobRequest, now_ms: int | None) -> Iterator[str]:
    deadline, start = request.deadline_ms, request.not_before_ms
    for field in ("created_ms", "deadline_ms", "not_before_ms"):
        value = getattr(request, field)
        if value is not None and not 0 <= value <= MAX_MS:
            yield f"{field} must be a time in Unix milliseconds, not {value}"
    if deadline is not None and now_ms is not None and deadline <= now_ms:
        yield f"deadline_ms lies {now_ms - deadline} ms in the past"
    if deadline is not None and start is not None and start >= deadline:
        yield f"not_before_ms ({start}) must lie before deadline_ms ({deadline})"


def _retry_problems(retry: RetryPolicy) -> Iterator[str]:
    if not 1 <= retry.max_attempts <= 100:
        yield f"retry.max_attempts must be from 1 to 100, not {retry.max_attempts}"
    for field, value in (
        ("backoff_ms", retry.backoff_ms),
        ("max_backoff_ms", retry.max_backoff_ms),
    ):
        if not 0 <= value <= WEEK_MS:
            yield f"retry.{field} must be from 0 to {WEEK_MS}, not {value}"


def metadata_problems(metadata: dict[str, str]) -> list[str]:
    return list(_metadata_problems(metadata))


def _metadata_problems(metadata: dict[str, str]) -> Iterator[str]:
    if len(metadata) > MAX_METADATA:
        yield f"metadata may have {MAX_METADATA} entries, not {len(metadata)}"
    for key, value in metadata.items():
        if not key or len(key) > MAX_NAME_CHARS:
            yield f"a metadata key must have 1 to {MAX_NAME_CHARS} characters, not {len(key)}"
        if len(value) > MAX_METADATA_CHARS:
            yield (
                f"metadata[{_short(key)}] may have {MAX_METADATA_CHARS} characters, not "
                f"{len(value)}"
            )
        if "\0" in key or "\0" in value:  # SQL text cannot hold it
            yield f"metadata[{_short(key)}] must not contain a null character"


def _size_problems(request: JobRequest) -> list[str]:
    size = encoded_size(request)
    if size is None:
        return ["the request holds a number beyond 64 bits"]
    if size > MAX_PAYLOAD_BYTES:
        return [f"the request has {size} bytes; the limit is {MAX_PAYLOAD_BYTES}"]
    return []


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


_PARAMS: Final = frozenset({"logprobs", "top_logprobs", "lora", "speculate"})
_DEFAULTS: Final = SamplingParams()
_WHY: Final = "cannot be given with continuations: they are scored, and nothing is drawn"


def continuation_problems(request: JobRequest) -> Iterator[str]:
    """Yield one sentence for each problem of the continuations, and of what stands beside them."""
    given = request.continuations
    if not given:
        return
    if len(given) > MAX_CHOICES:
        yield f"continuations may have {MAX_CHOICES} entries, not {len(given)}"
        return
    for i, one in enumerate(given):
        yield from _problems_of_one(one, f"continuations[{i}]", request.prompt_ids is not None)
    size = encoded_size(given)
    if size is not None and size > MAX_FORMAT_CHARS:
        yield f"continuations may have {MAX_FORMAT_CHARS} bytes, not {size}"
    if request.tools:
        yield f"tools {_WHY}"
    for field in msgspec.structs.fields(SamplingParams):
        name = field.name
        if name not in _PARAMS and getattr(request.params, name) != getattr(_DEFAULTS, name):
            yield f"{name} {_WHY}"


def _problems_of_one(given: str | tuple[int, ...], where: str, has_ids: bool) -> Iterator[str]:
    if not given:
        yield f"{where} is empty; it needs at least one token"
    elif not isinstance(given, str):
        yield from id_problems(where, given)
    elif has_ids:
        yield f"{where} is a text, and the prompt is token ids: give token ids here too"
