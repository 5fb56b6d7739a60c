"""Checks scripted answers against the JSON schemas of their requests, as a worker does.

Needs the optional package jsonschema-rs; without it no answer and no schema is checked.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

try:
    import jsonschema_rs
except ImportError:
    HAS_VALIDATOR = False
else:
    HAS_VALIDATOR = True

MAX_CHARS = 300  # of a message


def why_refused(schema: dict[str, object]) -> str | None:
    """Return why a schema cannot be used; None if it can. A worker refuses more: schemas that it
    cannot enforce token by token.
    """
    if not HAS_VALIDATOR:
        return None
    try:
        _validator(schema)
    except Exception as error:
        return (str(error).strip().split("\n", 1)[0] or type(error).__name__)[:MAX_CHARS]
    return None


def violation(schema: dict[str, object], text: str) -> str | None:
    """Return how an answer breaks its schema; None if it does not."""
    if not HAS_VALIDATOR:
        return None
    try:
        value = json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {str(error)[:MAX_CHARS]}"
    broken = next(_validator(schema).iter_errors(value), None)
    if broken is None:
        return None
    where = "/".join(str(step) for step in broken.instance_path)
    place = f"/{where[:MAX_CHARS]}" if where else "the top"
    return f"{str(broken.message)[:MAX_CHARS]} (at {place})"


def _validator(schema: dict[str, object]) -> Any:
    return jsonschema_rs.validator_for(schema, validate_formats=True, retriever=_no_other)


def _no_other(uri: str) -> Any:
    raise ValueError(f"{uri} is not part of the schema")
