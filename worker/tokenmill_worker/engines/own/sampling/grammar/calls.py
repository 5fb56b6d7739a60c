"""Writes grammars of answers that may call tools: free text, then calls that keep their schemas.

They are written in llguidance's form. The free text ends at the first trigger, by a lazy lexeme or
at the trigger's own token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenmill_schemas.generation import CallableTool, CallGrammar, ResponseFormat
from tokenmill_worker.engines.own.sampling.grammar.argument_rules import ToolRefused, argument_rules
from tokenmill_worker.engines.own.sampling.grammar.json_grammar import (
    JsonCompiler,
    JsonMatcher,
    SchemaRefused,
)
from tokenmill_worker.engines.own.sampling.grammar.json_schema import InvalidSchema


def compile_calls(compiler: JsonCompiler, wanted: ResponseFormat) -> Callable[[], JsonMatcher]:
    """Return a function that makes a matcher for each sequence.

    Raises ToolRefused for a tool, and as `compiler.compile` does for the schema of the answer.
    """
    assert wanted.calls is not None
    answer = None
    if wanted.json_schema is not None:
        schema = wanted.json_schema or {"type": "object"}
        answer = compiler.rewritten(schema, strict=wanted.strict)
    try:
        text = lark(wanted.calls, lambda tool: _schema(compiler, tool), answer)
        return compiler.compile_lark(text)
    except ToolRefused:
        raise
    except ValueError as error:
        raise ToolRefused(f"their grammar cannot be compiled: {error}") from error


def lark(
    calls: CallGrammar,
    schema_of: Callable[[CallableTool], dict[str, Any]],
    answer: dict[str, Any] | None = None,
) -> str:
    """Return the grammar as text.

    Args:
        calls: the form of the calls.
        schema_of: returns the schema of a tool as llguidance reads it.
        answer: the schema that binds an answer without calls; None: it is any text.
    """
    rules = []
    for i, tool in enumerate(calls.tools):
        begin = _terms(tool.name + calls.after, calls)
        if calls.arguments is None:
            rules.append(f"call_{i}: {begin} %json {json.dumps(schema_of(tool))}")
        else:
            rules.append(f"call_{i}: {begin} call_{i}_first_0")
            rules += argument_rules(f"call_{i}", calls.arguments, tool, schema_of)
    one = f"{_terms(calls.before, calls)} call {_terms(calls.end, calls)}"
    more = "" if calls.separator is None else f"({_terms(calls.separator, calls)} {one})*"
    tail = f"{one} {more} {_terms(calls.closing, calls)}"
    return "\n".join(
        (
            "%llguidance {}",
            "TEXT: /(.|\\n)*/",
            *_start(calls, tail, "TEXT" if answer is None else f"%json {json.dumps(answer)}"),
            "call: " + " | ".join(f"call_{i}" for i in range(len(calls.tools))),
            *rules,
        )
    )


def _start(calls: CallGrammar, tail: str, text: str) -> tuple[str, ...]:
    """Return the rules of the answer up to its first call. `text`: of an answer without calls."""
    first, *rest = _parts(calls.trigger, calls)
    others = " ".join(_term(part, calls) for part in rest)
    called = f"{_term(first, calls)} {others} {tail}"
    ways = called if calls.is_required else f"({called} | {_terms(calls.answer, calls)} {text})"
    if calls.asides:
        heads = " | ".join(_terms(head, calls) for head in calls.asides)
        aside = f"aside: ({heads}) TEXT {_terms(calls.aside_end, calls)}"
        return (f"start: aside* {ways}", aside)
    if calls.is_required or text != "TEXT":
        return (f"start: {ways}",)
    if calls.at_start:
        other = f"OTHER: /([^{re.escape(first[0])}](.|\\n)*)?/"
        return (f"start: OTHER | {called}", other)
    if first in calls.marks:
        return (f"start: TEXT | TEXT {called}",)
    lazy = f"trigger[lazy]: TEXT {json.dumps(first)}"
    return (f"start: TEXT | trigger {others} {tail}", lazy)


def _terms(text: str, calls: CallGrammar) -> str:
    return " ".join(_term(part, calls) for part in _parts(text, calls))


def _parts(text: str, calls: CallGrammar) -> list[str]:
    """Split a text at the marks, which are kept."""
    if not calls.marks:
        return [text] if text else []
    marks = "|".join(map(re.escape, sorted(calls.marks, key=len, reverse=True)))
    return [part for part in re.split(f"({marks})", text) if part]


def _term(part: str, calls: CallGrammar) -> str:
    return f"<[{calls.marks[part]}]>" if part in calls.marks else json.dumps(part)


def _schema(compiler: JsonCompiler, tool: CallableTool) -> dict[str, Any]:
    try:
        return compiler.rewritten(tool.schema, strict=tool.strict)
    except InvalidSchema as problem:
        raise ToolRefused(
            f"the parameters of {tool.name!r} are no valid JSON schema: {problem}"
        ) from problem
    except SchemaRefused as refusal:
        raise ToolRefused(
            f"the parameters of {tool.name!r} cannot be enforced: {refusal}"
        ) from refusal
