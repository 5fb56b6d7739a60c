"""Tests of our matchers as vLLM's grammars, without vLLM: its class has no code of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engines.own.sampling import GrammarCompiler

END = 256
VOCAB = [bytes([i]) for i in range(256)] + [b""]
MODULE = "tokenmill_worker.engines.vllm.grammars"
FORMS = {
    "an expression": ResponseFormat(regex="[0-9]{1,3}"),
    "a schema": ResponseFormat(json_schema={"type": "integer"}),
    "a grammar": ResponseFormat(grammar="root ::= [0-9]{1,3}"),
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [END])


@pytest.fixture
def grammar_of(
    monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler
) -> Callable[[ResponseFormat], Any]:
    for name in ("vllm", "vllm.v1", "vllm.v1.structured_output"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    types = SimpleNamespace(StructuredOutputGrammar=object)
    monkeypatch.setitem(sys.modules, "vllm.v1.structured_output.backend_types", types)
    module = importlib.import_module(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)
    return lambda form: module.MatchedGrammar(compiler.compile(form).result(60)())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_end_that_is_taken_back_leaves_an_answer_as_it_was(
    grammar_of: Callable[[ResponseFormat], Any], form: ResponseFormat
) -> None:
    """The engine takes back drafts that it tries, ends among them."""
    grammar = grammar_of(form)
    digit = ord("7")
    assert grammar.accept_tokens("r", [digit])
    for behind in ([], [digit]):
        assert grammar.accept_tokens("r", [END, *behind])
        assert grammar.is_terminated()
        grammar.rollback(1 + len(behind))
        assert not grammar.is_terminated()
        assert grammar.validate_tokens([digit]) == [digit]
        assert grammar.validate_tokens([END]) == [END]
    grammar.rollback(1)
    assert grammar.validate_tokens([digit, END]) == [digit, END]
    assert grammar.validate_tokens([END]) == []


def test_an_end_is_refused_before_an_answer_may_end(
    grammar_of: Callable[[ResponseFormat], Any],
) -> None:
    grammar = grammar_of(FORMS["an expression"])
    assert not grammar.accept_tokens("r", [END])
