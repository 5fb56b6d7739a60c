"""Describes the calls of the API as an OpenAPI document, which is made from their structs."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from tokenmill_gateway.server import Server
from tokenmill_schemas.openai import ErrorBody
from tokenmill_schemas.release import version

Handler = Callable[[Server, Request], Awaitable[ASGIApp]]
Parts = dict[type, Any]
_IN_PATH: Final = re.compile(r"{(\w+)(?::path)?}")
_JSON: Final = "application/json"
_FORM: Final = "multipart/form-data"
_SECURITY: Final[list[dict[str, list[str]]]] = [{"key": []}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One method of one path.

    `query` has the parameters of its query, `body` and `answer` are the JSON of both sides.
    `is_form`: the body is multipart/form-data. `other`: the further types that an answer may have.
    `is_public`: it asks for no key.
    """

    method: str
    path: str
    handler: Handler
    words: str
    answer: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    is_form: bool = False
    other: tuple[str, ...] = ()
    is_public: bool = False

    @property
    def plain_path(self) -> str:
        return _IN_PATH.sub(r"{\1}", self.path)


def document_of(calls: Iterable[Call]) -> dict[str, Any]:
    """Return the OpenAPI document of the calls."""
    calls = list(calls)
    kinds: list[type[msgspec.Struct]] = [ErrorBody]
    for call in calls:
        kinds += [kind for kind in (call.answer, call.query, call.body) if kind]
    kinds = list(dict.fromkeys(kinds))
    schemas, components = msgspec.json.schema_components(
        kinds, schema_hook=_any, ref_template="#/components/schemas/{name}"
    )
    of_kind: Parts = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for call in calls:
        paths.setdefault(call.plain_path, {})[call.method.lower()] = _operation(
            call, of_kind, components
        )
    for call in calls:  # a query is a list of parameters, no schema of its own
        if call.query is not None:
            components.pop(call.query.__name__, None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokenmill gateway", "version": version()},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _any(kind: type) -> dict[str, Any]:
    if kind is not object:
        raise NotImplementedError
    return {"description": "Any value"}


def _operation(call: Call, of_kind: Parts, components: dict[str, Any]) -> dict[str, Any]:
    error = {"description": "An error", "content": {_JSON: {"schema": of_kind[ErrorBody]}}}
    content: dict[str, Any] = {kind: {} for kind in call.other}
    if call.answer is not None:
        content[_JSON] = {"schema": of_kind[call.answer]}
    answered: dict[str, Any] = {"description": "The answer"}
    if content:
        answered["content"] = content
    found: dict[str, Any] = {
        "summary": call.words,
        "operationId": call.handler.__module__.rpartition(".")[2] + "_" + call.handler.__name__,
        "parameters": [*_in_path(call), *_in_query(call, components)],
        "responses": {"200": answered, "4XX": error, "5XX": error},
    }
    if not call.is_public:
        found["security"] = _SECURITY
    if call.body is not None:
        schema, kind = of_kind[call.body], _FORM if call.is_form else _JSON
        found["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    return found


def _in_path(call: Call) -> Iterable[dict[str, Any]]:
    for name in _IN_PATH.findall(call.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _in_query(call: Call, components: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if call.query is None:
        return
    described = components[call.query.__name__]
    for name, schema in described["properties"].items():
        is_list = schema.get("type") == "array"
        yield {
            "name": f"{name}[]" if is_list else name,
            "in": "query",
            "required": name in described.get("required", ()),
            "schema": schema,
        }
