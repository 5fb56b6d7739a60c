"""Compiles one grammar: JSON schemas and tools by llguidance, texts (regular expressions, EBNF and
structural tags) by xgrammar.

llguidance either enforces all of a schema or refuses it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec

from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engines.own.sampling.grammar.argument_rules import ToolRefused
from tokenmill_worker.engines.own.sampling.grammar.bitmasks import allowed_ids, open_masks
from tokenmill_worker.engines.own.sampling.grammar.calls import compile_calls
from tokenmill_worker.engines.own.sampling.grammar.errors import GrammarError
from tokenmill_worker.engines.own.sampling.grammar.json_grammar import JsonCompiler, SchemaRefused
from tokenmill_worker.engines.own.sampling.grammar.json_schema import InvalidSchema
from tokenmill_worker.engines.own.sampling.grammar.sources import LOOSE_JSON, sentence
from tokenmill_worker.engines.own.sampling.grammar.text_matcher import TextMatcher
from tokenmill_worker.engines.own.sampling.grammar.words import Encode, Words

_OF_JSON: Final = ("json", LOOSE_JSON, "tools")
# CPU seconds to begin an answer. Most grammars take 1 % of it; each of many choices takes it, and
# about a megabyte for a millisecond.
START_LIMIT_S: Final = 0.005
_NO_TEXT: Final = b"\xff"  # begins no text that a grammar can admit


class Libraries:
    """Both libraries over one vocabulary, which is read here; `started` is for several threads."""

    def __init__(self, info: Any, special_ids: Sequence[int], encode: Encode | None) -> None:
        import xgrammar

        stops, vocab = list(info.stop_token_ids), list(info.decoded_vocab)
        self._vocab_size = info.vocab_size
        self._words = Words(vocab, stops, special_ids, encode)
        self._json = JsonCompiler(self._words, info.vocab_size)
        # xgrammar knows no special tokens, only texts: with this text they stand for no other
        marked = {*special_ids} - {*stops}
        texts = [_NO_TEXT + text if i in marked else text for i, text in enumerate(vocab)]
        self._special = {vocab[i].decode("utf-8", "replace"): i for i in marked}
        self._texts = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=info.vocab_size,
            stop_token_ids=stops,
            add_prefix_space=info.add_prefix_space,
        )

    def tried(self, kind: str, source: str) -> str:
        """Compile a grammar and begin an answer; return a text's grammar serialised, "" for others.
        It may take any time and memory. Raises GrammarError.
        """
        compiled = None if kind in _OF_JSON else self._compiled_text(kind, source)
        start = self._started_json(kind, source) if compiled is None else self._starter(compiled)
        try:
            self._try(start)
        except GrammarError as error:
            raise GrammarError(f"{_named(kind)} cannot be compiled: {error}") from error
        return "" if compiled is None else str(compiled.serialize_json())

    def started(self, kind: str, source: str, compiled: str) -> Callable[[], Any]:
        """Return a function that makes a matcher for each sequence, from what `tried` returned."""
        if kind in _OF_JSON:
            return self._started_json(kind, source)
        import xgrammar

        return self._starter(xgrammar.CompiledGrammar.deserialize_json(compiled, self._texts))

    def _started_json(self, kind: str, source: str) -> Callable[[], Any]:
        if kind == "tools":
            try:
                wanted = msgspec.json.decode(source, type=ResponseFormat)
                return compile_calls(self._json, wanted)
            except ToolRefused as refused:
                raise GrammarError(str(refused)) from refused
        try:
            return self._json.compile(source, strict=kind == "json")
        except InvalidSchema as problem:
            raise GrammarError(f"{_named(kind)} is no valid JSON schema: {problem}") from problem
        except SchemaRefused as refusal:
            raise GrammarError(f"{_named(kind)} cannot be enforced: {refusal}") from refusal

    def _starter(self, compiled: Any) -> Callable[[], TextMatcher]:
        import xgrammar

        return lambda: TextMatcher(xgrammar.GrammarMatcher(compiled), self._words, self._vocab_size)

    def _compiled_text(self, kind: str, source: str) -> Any:
        try:
            if kind == "regex":
                return self._compiler.compile_regex(source)
            if kind == "grammar":
                return self._compiler.compile_grammar(source)
            tag = json.dumps(with_token_ids(json.loads(source), self._special))
            return self._compiler.compile_structural_tag(tag)
        except Exception as error:
            if isinstance(error, MemoryError) or str(error) == "std::bad_alloc":
                raise MemoryError from error
            raise GrammarError(f"{_named(kind)} cannot be compiled: {sentence(error)}") from error

    @cached_property
    def _compiler(self) -> Any:
        import xgrammar

        return xgrammar.GrammarCompiler(self._texts, max_threads=1, cache_enabled=False)

    def _try(self, start: Callable[[], Any]) -> None:
        """Read one token that is allowed. Raises GrammarError where there is none, or where the
        library gives up; so a step does not meet what shows at once.
        """
        if min(_cpu_s(start), _cpu_s(start)) > START_LIMIT_S:
            raise GrammarError("its rules are too many, or nested too deep, to begin an answer")
        matcher = start()
        if matcher.is_terminated():
            return
        mask = open_masks(1, self._vocab_size)
        matcher.fill_next_token_bitmask(mask, 0)
        ids = allowed_ids(mask[0], 1)
        if not ids:
            raise GrammarError("it admits no text")
        matcher.accept_token(ids[0])


def with_token_ids(part: Any, ids: dict[str, int]) -> Any:
    """Return a part of a structural tag in which special tokens that are named as tokens, and not
    as texts, have their ids.
    """
    if isinstance(part, list):
        return [with_token_ids(inner, ids) for inner in part]
    if not isinstance(part, dict):
        return part
    found = {key: with_token_ids(inner, ids) for key, inner in part.items() if key != "json_schema"}
    if "json_schema" in part:
        found["json_schema"] = part["json_schema"]
    if part.get("type") == "token":
        found["token"] = _id_of(part.get("token"), ids)
    for key in ("exclude_tokens", "trigger_tokens"):
        if isinstance(named := part.get(key), list):
            found[key] = [_id_of(token, ids) for token in named]
    if part.get("type") == "token_dispatch" and isinstance(found.get("rules"), list):
        found["rules"] = [
            [_id_of(rule[0], ids), *rule[1:]] if isinstance(rule, list) and rule else rule
            for rule in found["rules"]
        ]
    return found


def _cpu_s(call: Callable[[], object]) -> float:
    begun_s = time.thread_time()
    call()
    return time.thread_time() - begun_s


def _id_of(token: Any, ids: dict[str, int]) -> Any:
    return ids.get(token, token) if isinstance(token, str) else token


def _named(kind: str) -> str:
    if kind == "tools":
        return "a tool"
    return f"response_format.{'json_schema' if kind in ('json', LOOSE_JSON) else kind}"
