"""What a JSON schema may not contain, because the grammar made of it would not enforce it.

xgrammar passes over some keywords in silence. A promise of structured output that is not kept is worse
than a refusal, so these are refused, each by its name. Plain Python.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_DEPTH = 64  # the compiler's time grows faster than the depth
_IGNORED = ("contains", "not", "if", "dependentRequired", "dependentSchemas", "dependencies")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_BESIDE_ALTERNATIVES = ("properties", "required", "items", "prefixItems", "enum", "const", "pattern")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")


def schema_problems(schema: object, depth: int = 0) -> list[str]:
    """One sentence per keyword that would not be enforced."""
    if depth > MAX_DEPTH:
        return [f"the schema is nested more than {MAX_DEPTH} levels deep"]
    if not isinstance(schema, dict):
        return []
    found = [f"{key!r} is not supported" for key in _IGNORED if key in schema]
    if schema.get("uniqueItems"):
        found.append("'uniqueItems' is not supported")
    reference = schema.get("$ref")
    if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
        found.append(f"'$ref' to {reference[:100]!r} is not supported: it must point into the schema itself")
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        found.append("'pattern' together with 'minLength' or 'maxLength' is not supported")
    found += _alternatives(schema)
    for child in _children(schema):
        found += schema_problems(child, depth + 1)
    return list(dict.fromkeys(found))


def _alternatives(schema: dict[str, object]) -> Iterator[str]:
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and len(all_of) > 1:
        yield "'allOf' with several schemas is not supported"
    used = [key for key in _ALTERNATIVES if key in schema]
    beside = [key for key in _BESIDE_ALTERNATIVES if key in schema]
    if used and (beside or len(used) > 1):
        yield f"{used[0]!r} beside {(beside or used[1:])[0]!r} is not supported"


def _children(schema: dict[str, object]) -> Iterator[object]:
    for key in _MAPS:
        held = schema.get(key)
        if isinstance(held, dict):
            yield from held.values()
    for key in _LISTS:
        listed = schema.get(key)
        if isinstance(listed, list):
            yield from listed
    for key in _SINGLE:
        if key in schema:
            yield schema[key]
