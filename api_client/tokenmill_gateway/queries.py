"""Reads the parameters of a query into a struct, which also describes them in `/openapi.json`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import Request

from tokenmill_gateway.refusals import HttpRefusal, unsupported

Q = TypeVar("Q", bound=msgspec.Struct)
_PLACE: Final = re.compile(r"^(.*) - at `\$\.(\w+)")
_MISSING: Final = re.compile(r"missing required field `(\w+)`")


def query_of(request: Request, kind: type[Q]) -> Q:
    """Return the query of a request. Raises HttpRefusal, which names the parameter."""
    lists = _lists(kind)
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        plain = name.removesuffix("[]")
        if plain not in kind.__struct_fields__:
            raise unsupported(name[:64])
        if plain in lists:
            given.setdefault(plain, []).append(value)
        elif plain in given:
            raise HttpRefusal.of(400, "invalid_value", f"{plain} stands twice in the query", plain)
        else:
            given[plain] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


@cache
def _lists(kind: type[msgspec.Struct]) -> frozenset[str]:
    info: Any = inspect.type_info(kind)
    return frozenset(
        field.name for field in info.fields if isinstance(field.type, inspect.ListType)
    )


def _refusal(words: str) -> HttpRefusal:
    if missing := _MISSING.search(words):
        name = missing[1]
        sentence = f"Missing required parameter: {name!r}."
        return HttpRefusal.of(400, "missing_required_parameter", sentence, name)
    place = _PLACE.match(words)
    reason, name = place.groups() if place else (words, None)
    sentence = f"the query parameter {name} is not valid: {reason[:1].lower()}{reason[1:]}"
    return HttpRefusal.of(400, "invalid_value", sentence, name)
