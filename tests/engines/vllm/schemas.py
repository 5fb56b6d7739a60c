"""JSON schemas whose answers end: every part of them is bounded."""

from __future__ import annotations

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(least: int, most: int) -> dict[str, Any]:
    return {"type": "string", "minLength": least, "maxLength": most}


def _number(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _list(items: Any, least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": _object(
        name=_text(10, 30), born=_number(1000, 2000), works=_list(_text(5, 20), 3, 4)
    ),
    "a list of numbers": _list(_number(-50, 99_999), 4, 9),
    "a list of words": _list({"enum": ["red", "green", "blue", "é", "漢字"]}, 3, 8),
    "short texts": _list(_text(0, 3), 4, 8),
    "a long text": _object(text=_text(60, 90)),
    "a text of one pattern": _object(code={"type": "string", "pattern": "^[A-F]{4}-[0-9]{3,6}$"}),
    "two patterns": _list({"type": "string", "pattern": "^(ab|cd){2,5}x?$"}, 2, 4),
    "a date": _object(day={"type": "string", "format": "date"}, of=_text(1, 10)),
    "an address": {
        "$defs": {"place": _object(city=_text(3, 15), number=_number(1, 300))},
        **_object(home={"$ref": "#/$defs/place"}, work={"$ref": "#/$defs/place"}),
    },
    "a choice of forms": _list(
        {"anyOf": [_object(a=_number(0, 9)), _object(b=_text(2, 8)), {"type": "null"}]}, 3, 6
    ),
    "yes and no": _list({"type": "boolean"}, 5, 12),
    "constants": _object(kind={"const": "tree"}, size={"const": 17}, name=_text(5, 25)),
    "a matrix": _list(_list(_number(0, 9), 2, 3), 2, 3),
    "a tuple": {
        "type": "array",
        "prefixItems": [_number(1, 5), _text(4, 12), {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "an optional field": {
        "type": "object",
        "properties": {"a": _text(3, 9), "b": _number(0, 99), "c": _list(_number(0, 3), 1, 3)},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested objects": _object(a=_object(b=_object(c=_object(d=_text(5, 20))), e=_number(0, 9))),
    "numbers within bounds": _object(
        low={"type": "integer", "exclusiveMinimum": 7, "maximum": 12},
        even=_list(_number(100, 120), 2, 4),
    ),
    "names in unicode": _object(größe=_number(1, 200), 名前=_text(2, 12)),
    "quotes": _object(**{'a "quoted" name': _text(2, 12), "back\\slash": _text(2, 12)}),
    "a mixed list": _list({"enum": [1, 2.5, None, True, "x", [1], {"y": 0}]}, 4, 8),
}
