"""Checks of a job request that need no model.

Pure functions. The producer runs them at submit and the worker at admission, so that both reject
the same requests with the same messages. Vocabulary and context length are checked elsewhere.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES, encode
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest, RetryPolicy
from tokenmill_schemas.size_limits import (
    MAX_FORMAT_CHARS,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_PROMPT_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from tokenmill_schemas.webhook import redacted_url

# the width of the SQL columns: job id, model, tenant, idempotency key, batch id
MAX_NAME_CHARS: Final = 255
MAX_STOP_CHARS: Final = 1_024
MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 100
MAX_METADATA_CHARS: Final = 4_096
MAX_FORMAT_DEPTH: Final = 64
MAX_URL_CHARS: Final = 2_048
MAX_ID: Final = 2**31 - 1
MAX_MS: Final = 2**53
WEEK_MS: Final = 7 * 24 * 3_600_000

_ENVELOPE: Final = frozenset({"name", "schema", "strict"})
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")


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
    found += _name_problems(request)
    found += _prompt_problems(request)
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
        broken = _SURROGATE.search(text)
        if broken is not None:
            yield f"{field} is not valid Unicode: a lone surrogate stands at character {broken.start()}"


def _texts(request: JobRequest) -> Iterator[tuple[str, str]]:
    """Yield each text of the request, after the name of its field."""
    for field in (
        "job_id",
        "model",
        "prompt",
        "tenant",
        "idempotency_key",
        "webhook",
        "traceparent",
        "batch_id",
    ):
        text = getattr(request, field)
        if text is not None:
            yield field, text
    yield "lora", request.params.lora
    for i, message in enumerate(request.messages or ()):
        yield f"messages[{i}].content", message.content
    for i, stop in enumerate(request.params.stop):
        yield f"stop[{i}]", stop
    for key, value in request.metadata.items():
        yield "metadata", key
        yield "metadata", value
    wanted = request.params.response_format
    if wanted is not None:
        yield from (
            ("response_format", text) for text in (wanted.regex, wanted.grammar) if text is not None
        )
        yield from (("response_format.json_schema", text) for text in _strings(wanted.json_schema))


def _strings(value: object, depth: int = 0) -> Iterator[str]:
    """Yield the keys and values of nested JSON that are texts. Values nested deeper than the limit
    are left out; another check rejects them.
    """
    if isinstance(value, str):
        yield value
    elif depth <= MAX_FORMAT_DEPTH and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key, depth + 1)
            yield from _strings(item, depth + 1)
    elif depth <= MAX_FORMAT_DEPTH and isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, depth + 1)


def _name_problems(request: JobRequest) -> Iterator[str]:
    if not request.job_id:
        yield "job_id must not be empty"
    names = {
        field: getattr(request, field)
        for field in ("job_id", "model", "tenant", "idempotency_key", "batch_id")
    }
    for field, name in (names | {"lora": request.params.lora}).items():
        text = name or ""
        if len(text) > MAX_NAME_CHARS:
            yield f"{field} may have {MAX_NAME_CHARS} characters, not {len(text)}"
        elif _CONTROL.search(text):
            yield f"{field} must not contain control characters: {text!r}"
    if request.idempotency_key == "":
        yield "idempotency_key must not be empty; leave it out instead"
    webhook = request.webhook
    if webhook is not None and (len(webhook) > MAX_URL_CHARS or not _URL.fullmatch(webhook)):
        shown = _short(redacted_url(webhook))
        yield f"webhook must be an http or https URL of at most {MAX_URL_CHARS} characters, not {shown}"
    if request.traceparent is not None and len(request.traceparent) > MAX_NAME_CHARS:
        yield f"traceparent may have {MAX_NAME_CHARS} characters, not {len(request.traceparent)}"


def _prompt_problems(request: JobRequest) -> Iterator[str]:
    given = [
        name for name in ("prompt", "messages", "prompt_ids") if getattr(request, name) is not None
    ]
    if len(given) != 1:
        yield f"exactly one of prompt, messages and prompt_ids must be given, not {' and '.join(given) or 'none'}"
        return
    if not getattr(request, given[0]):
        yield f"{given[0]} is empty; it needs at least one {'message' if given[0] == 'messages' else 'token'}"
    if request.messages is not None and len(request.messages) > MAX_MESSAGES:
        yield f"messages may have {MAX_MESSAGES} entries, not {len(request.messages)}"
    if request.prompt_ids is not None and len(request.prompt_ids) > MAX_PROMPT_IDS:
        yield f"prompt_ids may have {MAX_PROMPT_IDS} ids, not {len(request.prompt_ids)}"
    yield from _id_problems("prompt_ids", request.prompt_ids or ())


def _id_problems(field: str, ids: tuple[int, ...]) -> Iterator[str]:
    lowest, highest = min(ids, default=0), max(ids, default=0)
    if lowest < 0 or highest > MAX_ID:
        yield f"{field} holds {lowest if lowest < 0 else highest}, which is no token id"


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
            yield f"metadata[{_short(key)}] may have {MAX_METADATA_CHARS} characters, not {len(value)}"
        if "\0" in key or "\0" in value:  # SQL text cannot hold it
            yield f"metadata[{_short(key)}] must not contain a null character"


def params_problems(params: SamplingParams) -> list[str]:
    """Return the problems of sampling parameters that do not depend on the model. NaN is rejected,
    since no comparison with it is true.
    """
    found = [
        f"{field} {rule}, not {getattr(params, field)}"
        for field, ok, rule in _ranges(params)
        if not ok
    ]
    if params.max_tokens is not None and params.min_tokens > params.max_tokens >= 1:
        found.append(
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})"
        )
    return [
        *found,
        *_stop_problems(params),
        *_bias_problems(params),
        *_format_problems(params.response_format),
    ]


def _ranges(params: SamplingParams) -> tuple[tuple[str, bool, str], ...]:
    """Return, for each field, its name, whether its value is allowed, and the rule."""
    p = params
    logprobs_ok = isinstance(p.logprobs, bool) or 0 <= p.logprobs <= MAX_TOP_LOGPROBS
    return (
        (
            "max_tokens",
            p.max_tokens is None or 1 <= p.max_tokens <= MAX_ID,
            f"must be from 1 to {MAX_ID}",
        ),
        ("min_tokens", 0 <= p.min_tokens <= MAX_ID, f"must be from 0 to {MAX_ID}"),
        ("temperature", 0.0 <= p.temperature <= 100.0, "must be from 0 to 100"),
        ("top_p", 0.0 <= p.top_p <= 1.0, "must be from 0 to 1"),
        ("top_k", -1 <= p.top_k <= MAX_ID, "must be -1 (off), 0 (off) or a positive count"),
        ("min_p", 0.0 <= p.min_p <= 1.0, "must be from 0 to 1"),
        ("presence_penalty", -2.0 <= p.presence_penalty <= 2.0, "must be from -2 to 2"),
        ("frequency_penalty", -2.0 <= p.frequency_penalty <= 2.0, "must be from -2 to 2"),
        (
            "repetition_penalty",
            0.0 < p.repetition_penalty <= 100.0,
            "must be above 0 and at most 100",
        ),
        ("logprobs", logprobs_ok, f"must be true, false or a count from 0 to {MAX_TOP_LOGPROBS}"),
        (
            "top_logprobs",
            0 <= p.top_logprobs <= MAX_TOP_LOGPROBS,
            f"must be from 0 to {MAX_TOP_LOGPROBS}",
        ),
        ("seed", p.seed is None or -(2**63) <= p.seed < 2**64, "must fit in 64 bits"),
        ("n", 1 <= p.n <= MAX_CHOICES, f"must be from 1 to {MAX_CHOICES}"),
    )


def _stop_problems(params: SamplingParams) -> Iterator[str]:
    if len(params.stop) > MAX_STOP_STRINGS:
        yield f"stop may have {MAX_STOP_STRINGS} strings, not {len(params.stop)}"
    for i, stop in enumerate(params.stop[:MAX_STOP_STRINGS]):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            yield f"stop[{i}] must have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}"
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield f"stop_token_ids may have {MAX_STOP_TOKEN_IDS} ids, not {len(params.stop_token_ids)}"
    yield from _id_problems("stop_token_ids", params.stop_token_ids)


def _bias_problems(params: SamplingParams) -> Iterator[str]:
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        yield f"logit_bias may have {MAX_LOGIT_BIASES} entries, not {len(params.logit_bias)}"
    yield from _id_problems("logit_bias", tuple(params.logit_bias))
    for token_id, bias in params.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            yield f"logit_bias[{token_id}] must be from -100 to 100, not {bias}"
            return  # report only the first such entry


def _format_problems(wanted: ResponseFormat | None) -> Iterator[str]:
    if wanted is None:
        return
    given = [
        name for name in ("json_schema", "regex", "grammar") if getattr(wanted, name) is not None
    ]
    if len(given) != 1:
        named = " and ".join(given) or "none"
        yield f"response_format needs exactly one of json_schema, regex and grammar, not {named}"
    for name, text in (("regex", wanted.regex), ("grammar", wanted.grammar)):
        if text is not None and not 1 <= len(text) <= MAX_FORMAT_CHARS:
            yield f"response_format.{name} must have 1 to {MAX_FORMAT_CHARS} characters, not {len(text)}"
    if wanted.json_schema is not None:
        yield from _schema_problems(wanted.json_schema)


def _schema_problems(schema: dict[str, object]) -> Iterator[str]:
    if _is_envelope(schema):
        yield (
            "response_format.json_schema holds OpenAI's envelope (name, strict, schema) in place of a JSON schema:"
            ' send what stands under its key "schema"'
        )
        return
    if _too_deep(schema, MAX_FORMAT_DEPTH):
        yield f"response_format.json_schema is nested deeper than {MAX_FORMAT_DEPTH} levels"
        return
    size = _encoded_size(schema)
    if size is None:
        yield "response_format.json_schema holds a number beyond 64 bits"
    elif size > MAX_FORMAT_CHARS:
        yield f"response_format.json_schema may have {MAX_FORMAT_CHARS} bytes, not {size}"


def _is_envelope(schema: dict[str, object]) -> bool:
    """Return whether a schema is OpenAI's envelope: its keys are only `name`, `schema`, `strict`
    and `description`, of which only the last is a keyword of JSON Schema. Read as a schema it would
    allow any value.
    """
    return not _ENVELOPE.isdisjoint(schema) and _ENVELOPE.union(("description",)).issuperset(schema)


def _too_deep(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list | tuple):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_too_deep(item, levels - 1) for item in items)


def _size_problems(request: JobRequest) -> list[str]:
    size = _encoded_size(request)
    if size is None:
        return ["the request holds a number beyond 64 bits"]
    return (
        [f"the request has {size} bytes; the limit is {MAX_PAYLOAD_BYTES}"]
        if size > MAX_PAYLOAD_BYTES
        else []
    )


def _encoded_size(value: object) -> int | None:
    """Return the size in bytes of MessagePack; None if an integer does not fit into 64 bits."""
    try:
        return len(encode(value))
    except OverflowError:
        return None


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
