"""The source of a grammar, by which it is compiled once, and messages of the libraries."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engines.own.sampling.grammar.errors import GrammarError

MAX_SOURCE_CHARS: Final = 200_000
LOOSE_JSON: Final = "json, not strict"
_POSITION = re.compile(r"^\[[0-9:]+\]\s+\S+:\d+:\s*")  # "[12:00:00] /project/cpp/file.cc:17: "
_CHECK = re.compile(r"^Check failed: \(.*?\) is false:\s*")


def source_of(wanted: ResponseFormat) -> tuple[str, str]:
    """Return (kind, source), equal for equal grammars.

    Raises GrammarError for a response format that would not be enforced.
    """
    if wanted.calls is not None:
        return _within_limit("tools", _written("tools", wanted))
    given = [
        (kind, value)
        for kind, value in (
            ("json", wanted.json_schema),
            ("regex", wanted.regex),
            ("grammar", wanted.grammar),
            ("structural_tag", wanted.structural_tag),
        )
        if value is not None
    ]
    if len(given) != 1:
        raise GrammarError("response_format needs exactly one format")
    kind, value = given[0]
    if not isinstance(value, str):
        # an empty schema admits any JSON object
        value = _written(kind, value or {"type": "object"})
    if kind == "json" and not wanted.strict:
        kind = LOOSE_JSON
    if not value:
        raise GrammarError(f"the {kind} is empty")
    return _within_limit(kind, value)


def _written(kind: str, value: Any) -> str:
    try:
        if kind == "tools":
            return msgspec.json.encode(value).decode()
        return json.dumps(value, separators=(",", ":"))
    except RecursionError:
        raise GrammarError(f"the {kind} is nested too deep") from None


def _within_limit(kind: str, value: str) -> tuple[str, str]:
    if len(value) > MAX_SOURCE_CHARS:
        raise GrammarError(
            f"the {kind} has {len(value)} characters; the limit is {MAX_SOURCE_CHARS}"
        )
    return kind, value


def sentence(error: Exception) -> str:
    """Return the library's message without its time stamp, source position and condition."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    lines = _CHECK.sub("", _POSITION.sub("", str(error).strip())).splitlines()
    return lines[0].strip() if lines and lines[0].strip() else type(error).__name__
