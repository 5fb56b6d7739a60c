"""Rewrites `propertyNames` with `properties`, `patternProperties` and `additionalProperties`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill_worker.engines.own.sampling.grammar.json_schema.complement import Inexpressible
from tokenmill_worker.engines.own.sampling.grammar.json_schema.patterns import of_length

_MAX_DEPTH = 4
_SILENT = ("type", "title", "description", "$comment", "default", "examples")


def objects_with(names: Any, resolve: Callable[[str], Any], depth: int = 0) -> dict[str, Any]:
    """Return the schema of objects whose names all match `names`; raises Inexpressible."""
    if names is True:
        return {}
    if names is False:
        return {"maxProperties": 0}
    if not isinstance(names, dict) or depth > _MAX_DEPTH:
        raise Inexpressible
    kinds = names.get("type", "string")
    if "string" not in ([kinds] if isinstance(kinds, str) else kinds):
        return {"maxProperties": 0}
    parts = [
        _part(key, value, resolve, depth) for key, value in names.items() if key not in _SILENT
    ]
    return {"allOf": parts} if parts else {}


def _part(key: str, value: Any, resolve: Callable[[str], Any], depth: int) -> dict[str, Any]:
    if key in ("enum", "const"):
        texts = [text for text in (value if key == "enum" else [value]) if isinstance(text, str)]
        return {"properties": dict.fromkeys(texts, True), "additionalProperties": False}
    if key == "pattern":
        return _matching(value)
    if key == "minLength":
        return _matching(of_length(int(value), None))
    if key == "maxLength":
        return _matching(of_length(0, int(value)))
    if key == "$ref":
        try:
            return objects_with(resolve(value), resolve, depth + 1)
        except ValueError:
            raise Inexpressible from None
    raise Inexpressible


def _matching(pattern: str) -> dict[str, Any]:
    return {"patternProperties": {pattern: True}, "additionalProperties": False}
