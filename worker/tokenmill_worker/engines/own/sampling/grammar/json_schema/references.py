"""Resolves references within one document, by JSON pointer, anchor or identifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from tokenmill_worker.engines.own.sampling.grammar.json_schema.keywords import subschemas

MAX_DEPTH = 64  # of nested schemas


class Unresolved(ValueError):
    """A reference without a target; the text says why."""


class TooDeep(Exception):
    """Schemas are nested more than MAX_DEPTH levels deep."""


@dataclass(frozen=True, slots=True)
class Place:
    """A schema, its JSON pointer in the document, and the URI that its own references are relative
    to.
    """

    schema: Any
    pointer: str
    base: str


class Resources:
    """All identifiers and anchors of a document; raises TooDeep."""

    def __init__(self, root: Any) -> None:
        self._resources: dict[str, Place] = {}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._bases: dict[str, str] = {}
        self._dynamic: dict[str, int] = {}
        self._walk(root, "", "", 0)
        self._resources.setdefault("", Place(root, "", ""))

    def _walk(self, schema: Any, pointer: str, base: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise TooDeep
        if not isinstance(schema, dict):
            return
        identifier = schema.get("$id")
        if isinstance(identifier, str):
            base = urldefrag(_joined(base, identifier)).url
            self._resources.setdefault(base, Place(schema, pointer, base))
        self._bases[pointer] = base
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(key), str):
                self._anchors.setdefault((base, name), Place(schema, pointer, base))
                self._dynamic[name] = self._dynamic.get(name, 0) + (key == "$dynamicAnchor")
        for step, inner in subschemas(schema):
            self._walk(inner, pointer + step, base, depth + 1)

    @property
    def root_base(self) -> str:
        return self._bases.get("", "")

    def base_of(self, pointer: str, otherwise: str) -> str:
        return self._bases.get(pointer, otherwise)

    def is_ambiguous(self, reference: str) -> bool:
        """Return whether the target of a $dynamicRef depends on the path by which it is reached."""
        return self._dynamic.get(urldefrag(reference).fragment, 0) > 1

    def resolve(self, reference: str, base: str) -> Place:
        """Return the target of a reference; raises Unresolved."""
        uri, fragment = urldefrag(_joined(base, reference))
        resource = self._resources.get(uri)
        if resource is None:
            raise Unresolved("it must point into the schema itself")
        fragment = unquote(fragment)
        if not fragment:
            return resource
        if not fragment.startswith("/"):
            try:
                return self._anchors[(resource.base, fragment)]
            except KeyError:
                raise Unresolved(f"there is no anchor {fragment!r}") from None
        schema = resource.schema
        for step in fragment[1:].split("/"):
            schema = _step(schema, step.replace("~1", "/").replace("~0", "~"))
        pointer = resource.pointer + fragment
        return Place(schema, pointer, self.base_of(pointer, resource.base))


def _step(value: Any, name: str) -> Any:
    if isinstance(value, dict) and name in value:
        return value[name]
    if isinstance(value, list) and name.isdigit() and int(name) < len(value):
        return value[int(name)]
    raise Unresolved("there is nothing at that place")


def _joined(base: str, reference: str) -> str:
    return (
        urldefrag(base).url + reference if reference.startswith("#") else urljoin(base, reference)
    )
