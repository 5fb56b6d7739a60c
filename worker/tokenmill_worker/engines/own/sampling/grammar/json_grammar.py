"""Grammars of JSON schemas by llguidance, from schemas rewritten by `json_schema.rewrite`.

llguidance enforces every keyword that it accepts and refuses the others by name. Here its refusals
become sentences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from tokenmill_worker.engines.own.sampling.grammar.errors import GrammarError
from tokenmill_worker.engines.own.sampling.grammar.json_schema import modern, rewrite
from tokenmill_worker.engines.own.sampling.grammar.words import MAX_FORCED, Words

# fixed white space: a small model could otherwise fill its answer with it
_STYLE: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_LOOSE: dict[str, Any] = {"lenient": True, "coerce_one_of": True}
_ONE_OF = "oneOf constraints"
_STOPS = (
    ("NoExtensionBias", "it admits no text here"),
    ("; ff_tokens)", "the text that must follow is too long"),
)
_SENTENCES = (
    ("Unsatisfiable schema", "no value satisfies it, or a part of it"),
    (_ONE_OF, "'oneOf' is not supported where its branches may admit the same value"),
    (
        "patternProperty regexes",
        "'patternProperties' is not supported where two patterns may match the same name",
    ),
    (
        "min/maxProperties",
        "'minProperties' and 'maxProperties' are not supported beside optional 'properties'",
    ),
    ("regex parse error", "'pattern' is no regular expression that is supported"),
)


class SchemaRefused(ValueError):
    """A schema that cannot be enforced; the text says which part, and where."""


class JsonMatcher:
    """State of one sequence in the grammar, with the methods of xgrammar's matcher."""

    def __init__(self, matcher: Any, stop_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self.stop_token_ids = stop_token_ids

    def is_terminated(self) -> bool:
        """Return whether only the end may follow."""
        return bool(self._matcher.is_stopped())

    def accept_token(self, token_id: int) -> bool:
        """Read a token; return False if it is not allowed.

        Raises GrammarError where the grammar is too complex to continue.
        """
        is_taken = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        if not is_taken:
            self._check()
        return is_taken

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def forced_tokens(self, most: int = MAX_FORCED) -> list[int]:
        """Return the first tokens of the text that must follow, as the model's tokenizer cuts it.
        Empty where several texts may follow.
        """
        return [int(i) for i in self._matcher.compute_ff_tokens()[:most]]

    def fill_next_token_bitmask(self, words: Tensor, row: int) -> None:
        """Write the mask of the next token to `words[row]`.

        Raises GrammarError where the grammar is too complex to continue.
        """
        into = words[row]
        self._matcher.unsafe_compute_mask_ptr(into.data_ptr(), into.numel() * into.element_size())
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _first_line(self._matcher.get_error())
            found = next((text for sign, text in _STOPS if sign in reason), None)
            raise GrammarError(found or f"it is too complex: {reason}")


class JsonCompiler:
    """Compiles grammars over one vocabulary; safe for several threads."""

    def __init__(self, words: Words, vocab_size: int) -> None:
        """Read the vocabulary; `vocab_size` is the width of the logits."""
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        self._stops = words.stop_token_ids
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(words), n_vocab=vocab_size, eos_token=self._stops
        )

    def compile(self, source: str, *, strict: bool) -> Callable[[], JsonMatcher]:
        """Return a function that makes a matcher for each sequence.

        Raises InvalidSchema for a schema that no answer can be validated against. With `strict`,
        raises SchemaRefused for a part that cannot be enforced; without, that part stays open.
        """
        schema = json.loads(source)
        grammar, _ = self._strict(schema) if strict else self._loose(schema)
        return lambda: JsonMatcher(grammar.deep_copy(), self._stops)

    def rewritten(self, schema: Any, *, strict: bool) -> dict[str, Any]:
        """Return a schema that can stand in a grammar of llguidance, with the style of `compile`.

        Raises as `compile` does.
        """
        _, found = self._strict(schema) if strict else self._loose(schema)
        return {**_as_object(found), "x-guidance": _STYLE if strict else _STYLE | _LOOSE}

    def compile_lark(self, source: str) -> Callable[[], JsonMatcher]:
        """Compile a grammar in llguidance's own form. Raises ValueError."""
        from llguidance import LLMatcher

        grammar = LLMatcher(self._tokenizer, source, log_level=0)
        if grammar.is_error():
            raise ValueError(_first_line(grammar.get_error()))
        return lambda: JsonMatcher(grammar.deep_copy(), self._stops)

    def _strict(self, schema: Any) -> tuple[Any, Any]:
        read = modern(schema)
        rewritten = rewrite(read.schema)
        if problems := (*read.problems, *rewritten.problems):
            raise SchemaRefused("; ".join(problems))
        if _has_lowest(rewritten.schema):
            raise SchemaRefused("it holds an integer near -2^63, which is not supported")
        grammar = self._grammar(rewritten.schema)
        if _ONE_OF in grammar.get_error():
            rewritten = rewrite(read.schema, expand_one_of=True)
            grammar = self._grammar(rewritten.schema)
        if grammar.is_error():
            raise SchemaRefused(_explained(grammar.get_error()))
        return grammar, rewritten.schema

    def _loose(self, schema: Any) -> tuple[Any, Any]:
        found: Any = rewrite(modern(schema).schema).schema
        grammar = None if _has_lowest(found) else self._grammar(found, **_LOOSE)
        if grammar is None or grammar.is_error():
            found = {"type": "object"} if _is_object(schema) else {}
            grammar = self._grammar(found)
        return grammar, found

    def _grammar(self, schema: Any, **options: bool) -> Any:
        from llguidance import LLMatcher

        text = json.dumps(_as_object(schema))
        return LLMatcher(
            self._tokenizer,
            LLMatcher.grammar_from_json_schema(text, overrides=cast("Any", _STYLE | options)),
            log_level=0,
        )


def _explained(error: str) -> str:
    line = _first_line(error)
    return next((sentence for start, sentence in _SENTENCES if line.startswith(start)), line)


def _first_line(error: str) -> str:
    return error.strip().split("\n", 1)[0].strip()


def _has_lowest(part: Any) -> bool:
    """Return True if a schema holds an integer whose float is -2^63: there llguidance recurses
    until the process dies of its stack.
    """
    if isinstance(part, dict):
        return any(map(_has_lowest, part.values()))
    if isinstance(part, list):
        return any(map(_has_lowest, part))
    return type(part) is int and -(2**64) < part < 0 and float(part) == -(2.0**63)


def _as_object(schema: Any) -> dict[str, Any]:
    return schema if isinstance(schema, dict) else {"allOf": [schema]}


def _is_object(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "object"
