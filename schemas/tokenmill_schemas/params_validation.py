"""Checks sampling parameters without a model: ranges, stop strings, biases, response format."""

from collections.abc import Iterator
from typing import Final

from tokenmill_schemas.codec import encode
from tokenmill_schemas.generation import (
    LOGPROBS_MODES,
    ResponseFormat,
    SamplingParams,
    sequence_problems,
)
from tokenmill_schemas.generation import MAX_NGRAM as MAX_NGRAM
from tokenmill_schemas.generation import MAX_SEQUENCE_IDS as MAX_SEQUENCE_IDS
from tokenmill_schemas.generation import MAX_SEQUENCES as MAX_SEQUENCES
from tokenmill_schemas.size_limits import (
    MAX_FORMAT_CHARS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_STOP_CHARS: Final = 1_024
MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 100
MAX_FORMAT_DEPTH: Final = 64
MAX_ID: Final = 2**31 - 1
FORMATS: Final = ("json_schema", "regex", "grammar", "structural_tag")

_ENVELOPE: Final = frozenset({"name", "schema", "strict"})


def params_problems(params: SamplingParams) -> list[str]:
    """Return the problems of a producer's sampling parameters, which do not depend on the model."""
    return [*sampling_problems(params), *_format_problems(params.response_format)]


def sampling_problems(params: SamplingParams) -> list[str]:
    """Return the problems of all parameters but the response format."""
    found = [*value_problems(params), *_stop_problems(params)]
    if params.max_tokens is not None and params.min_tokens > params.max_tokens >= 1:
        found.append(
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})"
        )
    return found


def value_problems(params: SamplingParams) -> list[str]:
    """Return the problems of single values. A worker completes parameters, so an engine checks no
    more: it may add stop ids, and lower max_tokens. NaN is rejected, since no comparison with it is
    true.
    """
    found = [
        f"{field} {rule}, not {getattr(params, field)}"
        for field, ok, rule in _ranges(params)
        if not ok and getattr(params, field) is not None
    ]
    return [
        *found,
        *_logprobs_mode_problems(params.logprobs_mode),
        *_bias_problems(params),
        *(found for name, ids in params.named_ids.items() for found in id_problems(name, ids)),
        *sequence_problems(params),
    ]


def _ranges(params: SamplingParams) -> tuple[tuple[str, bool, str], ...]:
    """Return, for each field, its name, whether its value is allowed, and the rule."""
    p, numbers = params, params.numbers
    logprobs_ok = isinstance(p.logprobs, bool) or 0 <= p.logprobs <= MAX_TOP_LOGPROBS
    return (
        (
            "max_tokens",
            p.max_tokens is None or 1 <= p.max_tokens <= MAX_ID,
            f"must be from 1 to {MAX_ID}",
        ),
        ("min_tokens", 0 <= p.min_tokens <= MAX_ID, f"must be from 0 to {MAX_ID}"),
        (
            "thinking_budget",
            p.thinking_budget is None or 0 <= p.thinking_budget <= MAX_ID,
            f"must be from 0 to {MAX_ID}",
        ),
        ("temperature", 0.0 <= numbers.temperature <= 100.0, "must be from 0 to 100"),
        ("top_p", 0.0 <= numbers.top_p <= 1.0, "must be from 0 to 1"),
        ("top_k", -1 <= numbers.top_k <= MAX_ID, "must be -1 (off), 0 (off) or a positive count"),
        ("min_p", 0.0 <= numbers.min_p <= 1.0, "must be from 0 to 1"),
        ("presence_penalty", -2.0 <= p.presence_penalty <= 2.0, "must be from -2 to 2"),
        ("frequency_penalty", -2.0 <= p.frequency_penalty <= 2.0, "must be from -2 to 2"),
        (
            "repetition_penalty",
            1e-6 <= numbers.repetition_penalty <= 100.0,  # below, logits become infinite
            "must be from 0.000001 to 100",
        ),
        ("logprobs", logprobs_ok, f"must be true, false or a count from 0 to {MAX_TOP_LOGPROBS}"),
        (
            "top_logprobs",
            0 <= p.top_logprobs <= MAX_TOP_LOGPROBS,
            f"must be from 0 to {MAX_TOP_LOGPROBS}",
        ),
        (
            "prompt_logprobs",
            p.prompt_logprobs is None or 0 <= p.prompt_logprobs <= MAX_TOP_LOGPROBS,
            f"must be from 0 to {MAX_TOP_LOGPROBS}",
        ),
        ("seed", p.seed is None or -(2**63) <= p.seed < 2**64, "must fit in 64 bits"),
        ("n", 1 <= p.n <= MAX_CHOICES, f"must be from 1 to {MAX_CHOICES}"),
    )


def rules() -> dict[str, str]:
    """Return what each parameter whose values are bounded must be, for tables."""
    ids = f"{MAX_SEQUENCE_IDS:,} ids at most"
    sequences = f"{MAX_SEQUENCES:,} sequences at most, of {MAX_SEQUENCE_IDS:,} ids"
    return {
        **{name: rule.removeprefix("must be ") for name, _, rule in _ranges(SamplingParams())},
        "seed": "a number of 64 bits",
        "response_format": f"{MAX_FORMAT_CHARS:,} characters at most",
        "lora": "a name",
        "stop": f"{MAX_STOP_STRINGS} strings at most",
        "stop_token_ids": f"{MAX_STOP_TOKEN_IDS:,} ids at most",
        "logit_bias": f"{MAX_LOGIT_BIASES:,} ids at most, each from -100 to 100",
        "logprobs_mode": " or ".join(LOGPROBS_MODES),
        "bad_words_ids": sequences,
        "sequence_bias": sequences,
        "no_repeat_ngram_size": f"from 1 to {MAX_NGRAM}",
        "suppress_tokens": ids,
        "begin_suppress_tokens": ids,
        "forced_bos_token_id": "an id",
        "forced_eos_token_id": "an id, or several",
    }


def _logprobs_mode_problems(mode: str | None) -> Iterator[str]:
    if mode is not None and mode not in LOGPROBS_MODES:
        yield f"logprobs_mode must be {' or '.join(LOGPROBS_MODES)}, not {mode[:40]!r}"


def _stop_problems(params: SamplingParams) -> Iterator[str]:
    if len(params.stop) > MAX_STOP_STRINGS:
        yield f"stop may have {MAX_STOP_STRINGS} strings, not {len(params.stop)}"
    for i, stop in enumerate(params.stop[:MAX_STOP_STRINGS]):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            yield f"stop[{i}] must have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}"
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield f"stop_token_ids may have {MAX_STOP_TOKEN_IDS} ids, not {len(params.stop_token_ids)}"


def _bias_problems(params: SamplingParams) -> Iterator[str]:
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        yield f"logit_bias may have {MAX_LOGIT_BIASES} entries, not {len(params.logit_bias)}"
    for token_id, bias in params.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            yield f"logit_bias[{token_id}] must be from -100 to 100, not {bias}"
            return  # report only the first such entry


def _format_problems(wanted: ResponseFormat | None) -> Iterator[str]:
    if wanted is None:
        return
    if wanted.calls is not None:
        yield "response_format.calls is the worker's own: send tools"
    given = [name for name in FORMATS if getattr(wanted, name) is not None]
    if len(given) != 1:
        named = " and ".join(given) or "none"
        yield f"response_format needs exactly one of {', '.join(FORMATS)}, not {named}"
    for name, text in (("regex", wanted.regex), ("grammar", wanted.grammar)):
        if text is not None and not 1 <= len(text) <= MAX_FORMAT_CHARS:
            yield (
                f"response_format.{name} must have 1 to {MAX_FORMAT_CHARS} characters, not "
                f"{len(text)}"
            )
    if wanted.json_schema is not None:
        yield from _schema_problems(wanted.json_schema)
    if wanted.structural_tag is not None:
        yield from _object_problems(wanted.structural_tag, "structural_tag")


def _schema_problems(schema: dict[str, object]) -> Iterator[str]:
    if _is_envelope(schema):
        yield (
            "response_format.json_schema holds OpenAI's envelope (name, strict, schema) in place "
            "of a JSON schema:"
            ' send what stands under its key "schema"'
        )
        return
    yield from _object_problems(schema, "json_schema")


def _object_problems(value: dict[str, object], name: str) -> Iterator[str]:
    if too_deep(value, MAX_FORMAT_DEPTH):
        yield f"response_format.{name} is nested deeper than {MAX_FORMAT_DEPTH} levels"
        return
    size = encoded_size(value)
    if size is None:
        yield f"response_format.{name} holds a number beyond 64 bits"
    elif size > MAX_FORMAT_CHARS:
        yield f"response_format.{name} may have {MAX_FORMAT_CHARS} bytes, not {size}"


def _is_envelope(schema: dict[str, object]) -> bool:
    """Return whether a schema is OpenAI's envelope: its keys are only `name`, `schema`, `strict`
    and `description`, of which only the last is a keyword of JSON Schema. Read as a schema it would
    allow any value.
    """
    return not _ENVELOPE.isdisjoint(schema) and _ENVELOPE.union(("description",)).issuperset(schema)


def too_deep(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list | tuple):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(too_deep(item, levels - 1) for item in items)


def encoded_size(value: object) -> int | None:
    """Return the size in bytes of MessagePack; None if an integer does not fit into 64 bits."""
    try:
        return len(encode(value))
    except OverflowError:
        return None


def id_problems(field: str, ids: tuple[int, ...]) -> Iterator[str]:
    lowest, highest = min(ids, default=0), max(ids, default=0)
    if lowest < 0 or highest > MAX_ID:
        yield f"{field} holds {lowest if lowest < 0 else highest}, which is no token id"
