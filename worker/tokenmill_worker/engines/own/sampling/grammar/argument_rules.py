"""Writes the rules of a call whose arguments are written one by one, in llguidance's form.

The arguments keep the order of the schema; those that are not required may be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from tokenmill_schemas.generation import ArgumentForm, CallableTool
from tokenmill_worker.contract.named_arguments import (
    NamedArgument,
    named_arguments,
    unenforced,
)

_NONE: Final = '""'  # of a rule: nothing follows


class ToolRefused(ValueError):
    """A tool whose parameters cannot be used; the text is one sentence."""


def argument_rules(
    rule: str,
    form: ArgumentForm,
    tool: CallableTool,
    schema_of: Callable[[CallableTool], dict[str, Any]],
) -> Iterator[str]:
    """Yield the rules; that of the arguments is `RULE_first_0`.

    Args:
        rule: the name with which the names of the rules begin.
        form: how an argument is written.
        tool: its schema is read.
        schema_of: returns the schema of a tool as llguidance reads it, or raises ToolRefused.
    """
    schema_of(tool)  # refuse what is no valid schema
    try:
        arguments = named_arguments(tool.schema)
    except ValueError as error:
        raise ToolRefused(f"the parameters of {tool.name!r} {error}") from error
    left = unenforced(tool.schema, has_plain_texts=form.has_plain_texts) if tool.strict else []
    if left:
        raise ToolRefused(
            f"the parameters of {tool.name!r} cannot be enforced in this model's form: {left[0]!r}"
        )
    for i, argument in enumerate(arguments):
        if form.has_plain_texts and any(_ends_within(choice, form) for choice in argument.choices):
            raise ToolRefused(
                f"the parameters of {tool.name!r} have a value of {argument.name!r} with "
                f"{form.end.strip()!r}, which ends a value in this model's form"
            )
        one = f"{rule}_{i}"
        after = f"{one} {rule}_more_{i + 1}"
        skip = "" if argument.is_required else f" | {rule}_first_{i + 1}"
        yield f"{rule}_first_{i}: {after}{skip}"
        skip = "" if argument.is_required else f" | {rule}_more_{i + 1}"
        yield f"{rule}_more_{i}: {_text(form.separator)} {after}{skip}"
        begin = _text(form.before + argument.name + form.after)
        yield from _value(one, begin, form, argument, lambda schema: _read(tool, schema, schema_of))
    yield f"{rule}_first_{len(arguments)}: {_NONE}"
    yield f"{rule}_more_{len(arguments)}: {_NONE}"


def _ends_within(choice: str, form: ArgumentForm) -> bool:
    """Return whether a plain text would end early, since it has the text that ends a value."""
    return (choice + form.end).index(form.end) < len(choice)


def _value(
    rule: str,
    begin: str,
    form: ArgumentForm,
    argument: NamedArgument,
    read: Callable[[Any], dict[str, Any]],
) -> Iterator[str]:
    if form.has_plain_texts and argument.is_text:
        if argument.choices:
            texts = " | ".join(_text(choice + form.end) for choice in argument.choices)
            yield f"{rule}: {begin} ({texts})"
            return
        yield f"{rule}: {begin} {rule.upper()}"
        least, most = argument.lengths
        count = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
        end = re.escape(form.end).replace("\\\n", "\\n").replace("/", "\\/")
        other = f"/(.|\\n)*{end}(.|\\n)+/"  # the value ends at the first end
        yield f"{rule.upper()}: /(.|\\n){count}{end}/ & ~{other}"
        return
    values = " | ".join(_alternatives(form, argument.schema, read))
    yield f"{rule}: {begin} ({values}) {_text(form.end)}"


def _alternatives(
    form: ArgumentForm, schema: Any, read: Callable[[Any], dict[str, Any]]
) -> Iterator[str]:
    """Yield what a value may be. Words stand for booleans and null, also in `anyOf`."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    bare = isinstance(schema, dict) and not schema.keys() & {"enum", "const", "not", "allOf"}
    if form.words and bare and kinds == "boolean":
        yield f"{_text(form.words['true'])} | {_text(form.words['false'])}"
    elif form.words and bare and kinds == "null":
        yield _text(form.words["null"])
    elif form.words and bare and isinstance(kinds, list):
        for kind in kinds:
            yield from _alternatives(form, {**schema, "type": kind}, read)
    elif form.words and bare and "anyOf" in schema:
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        for option in schema["anyOf"]:
            inner = {**option, **shared} if isinstance(option, dict) else option
            yield from _alternatives(form, inner, read)
    else:
        yield f"%json {json.dumps(read(schema))}"


def _read(
    tool: CallableTool, schema: Any, schema_of: Callable[[CallableTool], dict[str, Any]]
) -> dict[str, Any]:
    return schema_of(msgspec.structs.replace(tool, schema=schema))


def _text(text: str) -> str:
    return json.dumps(text)
