"""Tokens that a grammar forces: proposed as drafts, they change no answer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engines.own.sampling.grammar.hostile import arrays, doubling
from tests.engines.own.sampling.grammar.test_masks import (
    EOS,
    JSON,
    VOCAB,
    WIDTH,
    make_sampler,
    run,
    structured,
)
from tests.engines.own.sampling.helpers import plan_item
from tokenmill_schemas.chat import Tool, ToolFunction
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.engines.own.plan import NO_DRAFT, Draft
from tokenmill_worker.engines.own.sampling import GrammarCompiler, Sampler
from tokenmill_worker.engines.own.sampling.grammar import text_matcher
from tokenmill_worker.engines.own.sampling.grammar.bitmasks import each_allowed, open_masks
from tokenmill_worker.engines.own.sampling.grammar.text_matcher import WALK_LIMIT_S, TextMatcher
from tokenmill_worker.engines.own.sampling.grammar.words import MAX_FORCED, MAX_TEXT, Words
from tokenmill_worker.engines.own.sequence import Sequence
from tokenmill_worker.text.chat.tools import HERMES, XML, ToolFormat, call_grammar


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [EOS])


ORDER = ResponseFormat(regex=r"name: [0-9]{2}, (true|null) or \\[\\[(a|b)\\]\\]")
QUERY = ResponseFormat(grammar='root ::= "name: " [a-c] [a-c] ": true, " ("12" | "null") ", abc"')


@pytest.mark.parametrize("penalty", [0.0, 0.7])
@pytest.mark.parametrize("wanted", [JSON, ORDER, QUERY], ids=["JSON", "regex", "EBNF"])
def test_forced_tokens_as_drafts_change_no_answer(
    compiler: GrammarCompiler, wanted: ResponseFormat, penalty: float
) -> None:
    """Certain tokens are not drawn; those after them keep their own noise and penalties."""
    for seed in range(4):
        options = {"temperature": 0.8, "presence_penalty": penalty}
        plain, drafted = (structured(wanted, seed, **options) for _ in range(2))
        run(make_sampler(compiler), [plain])
        sampler = make_sampler(compiler)
        proposed: list[Draft] = []

        def propose(sequence: Sequence, sampler: Sampler = sampler, seen: Any = proposed) -> Any:
            draft = sampler.forced_tokens(sequence)
            seen.append(draft)
            count = draft.num_certain
            return draft.token_ids[count:], draft.token_ids[:count]

        run(sampler, [drafted], proposer=propose)
        assert drafted.output_ids == plain.output_ids
        certain = sum(draft.num_certain for draft in proposed)
        guessed = sum(len(draft.token_ids) for draft in proposed) - certain
        assert certain
        assert (guessed > 0) == (wanted is not JSON)


def test_tokens_whose_logits_matter_are_not_certain(compiler: GrammarCompiler) -> None:
    sampler = make_sampler(compiler)
    assert sampler.forced_tokens(structured(JSON)).num_certain == 3
    for params in ({"logprobs": 1}, {"min_tokens": 2}, {"logit_bias": {5: -1.0}}):
        draft = sampler.forced_tokens(structured(JSON, **params))
        assert (len(draft.token_ids), draft.num_certain) == (3, 0)


def test_a_grammar_forces_its_text_in_the_longest_tokens(compiler: GrammarCompiler) -> None:
    sampler, sequence = make_sampler(compiler), structured(JSON)
    forced = sampler.forced_tokens(sequence).token_ids
    assert b'{"name": "'.startswith(b"".join(VOCAB[i] for i in forced))
    assert [VOCAB[i] for i in forced[:3]] == [b'{"', b"name", b'": ']
    sequence.token_ids += forced
    rest = sampler.forced_tokens(sequence).token_ids
    assert len(rest) <= 1, "a name of any text may follow"
    forced = sampler.forced_tokens(structured(ORDER)).token_ids
    assert [VOCAB[i] for i in forced] == [b"name", b":", b" "]
    assert sampler.forced_tokens(Sequence("r", [1], 1, SamplingParams(), seed=0)) == NO_DRAFT


def test_tokens_that_a_grammar_refuses_are_reported_by_the_mask(compiler: GrammarCompiler) -> None:
    sampler, sequence = make_sampler(compiler), structured(JSON)
    sequence.token_ids += list(b"no")
    assert sampler.forced_tokens(sequence) == NO_DRAFT
    item = plan_item(sequence)
    _, _, errors = sampler.sample(torch.zeros(1, WIDTH), [item]).finish()
    assert "is not in the grammar" in errors[0]


def test_matching_for_drafts_counts_as_time_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, sequence = make_sampler(compiler), structured(JSON)
    sequence.token_ids += sampler.forced_tokens(sequence).token_ids
    clock = iter([0.0, 9.0, 9.0, 9.0])  # forced_tokens, then the mask
    monkeypatch.setattr("time.thread_time", lambda: next(clock))
    sampler.forced_tokens(sequence)
    _, _, errors = sampler.sample(torch.zeros(1, WIDTH), [plan_item(sequence)]).finish()
    assert "too ambiguous" in errors[0]


def test_a_walk_that_raises_counts_as_time_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def fail(*_: object) -> list[int]:
        nonlocal now_s
        now_s += 9
        raise RuntimeError("it is bad")

    sampler, sequence = make_sampler(compiler), structured(ORDER)
    monkeypatch.setattr("time.thread_time", lambda: now_s)
    monkeypatch.setattr(TextMatcher, "forced_tokens", fail)
    assert sampler.forced_tokens(sequence) == NO_DRAFT
    _, _, errors = sampler.sample(torch.zeros(1, WIDTH), [plan_item(sequence)]).finish()
    assert "too ambiguous" in errors[0]


def test_a_walk_ends_at_its_limit_of_time(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft of a text that costs much for each byte has what the limit allows."""
    matcher = compiler.compile(ResponseFormat(regex="(abcdefghij){100}")).result(60)()
    now_s, forced_byte = 0.0, TextMatcher._forced_byte

    def slow(matcher: TextMatcher) -> bytes:
        nonlocal now_s
        now_s += WALK_LIMIT_S / 2.5
        return forced_byte(matcher)

    monkeypatch.setattr("time.thread_time", lambda: now_s)
    monkeypatch.setattr(TextMatcher, "_forced_byte", slow)
    assert b"".join(VOCAB[i] for i in matcher.forced_tokens()) == b"abc"
    assert matcher.accept_token(ord("a"))


class Counted:
    """A matcher of xgrammar that counts its masks."""

    def __init__(self, matcher: Any) -> None:
        self._matcher, self.masks = matcher, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def fill_next_token_bitmask(self, words: Any, row: int) -> None:
        self.masks += 1
        self._matcher.fill_next_token_bitmask(words, row)


def test_a_grammar_without_forced_tokens_costs_one_mask_and_few_tokens_a_step(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def each(words: torch.Tensor) -> Iterator[int]:
        for token_id in each_allowed(words):
            seen.append(token_id)
            yield token_id

    monkeypatch.setattr(text_matcher, "each_allowed", each)
    start = compiler.compile(ResponseFormat(regex="(ab|[^b]){200}")).result(60)
    matcher, plain = start(), start()
    counted = matcher._matcher = Counted(matcher._matcher)
    found, wanted = open_masks(1, len(VOCAB)), open_masks(1, len(VOCAB))
    for step, token_id in enumerate(b"ab1a2abb", 1):
        seen.clear()
        assert matcher.forced_tokens() == []
        assert len(seen) <= 2
        matcher.fill_next_token_bitmask(found, 0)
        plain.fill_next_token_bitmask(wanted, 0)
        assert found.equal(wanted)
        assert counted.masks == step
        assert matcher.accept_token(token_id) == plain.accept_token(token_id)


def test_masks_after_a_walk_of_forced_text_equal_those_without(compiler: GrammarCompiler) -> None:
    start = compiler.compile(ResponseFormat(regex="name: ([0-9]x){3}(true|tru1)")).result(60)
    matcher, plain = start(), start()
    found, wanted = open_masks(1, len(VOCAB)), open_masks(1, len(VOCAB))
    for token_id in b"name: 1x2x3xtru1":
        matcher.forced_tokens()
        matcher.fill_next_token_bitmask(found, 0)
        plain.fill_next_token_bitmask(wanted, 0)
        assert found.equal(wanted)
        assert matcher.accept_token(token_id)
        matcher.forced_tokens()
        matcher.rollback(1)
        matcher.fill_next_token_bitmask(found, 0)
        assert found.equal(wanted)
        assert matcher.accept_token(token_id)
        assert plain.accept_token(token_id)


def with_calls(value: dict[str, Any], form: ToolFormat) -> ResponseFormat:
    schema = {"properties": {"x": value}, "required": ["x"], "additionalProperties": False}
    tools = (Tool(ToolFunction("f", parameters=schema)),)
    return ResponseFormat(calls=call_grammar(form, {}, tools, "required", False))


def tagged(form: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat(structural_tag={"type": "structural_tag", "format": form})


LONG = {
    "EBNF": ResponseFormat(grammar=doubling(40)),
    "EBNF, repeated": ResponseFormat(grammar='root ::= ("ab"{1000000}){1000000}'),
    "EBNF, for ever": ResponseFormat(grammar='root ::= "ab" root'),
    "regex": ResponseFormat(regex="((x{1000}){1000}){1000}"),
    "tag": tagged({"type": "const_string", "value": "x" * 100_000}),
    "grammar of a tag": tagged({"type": "grammar", "grammar": doubling(40)}),
    "schema": ResponseFormat(json_schema=arrays(12)),
    "const": ResponseFormat(json_schema={"const": "é" * 15_000}),
    "pattern": ResponseFormat(json_schema={"type": "string", "pattern": "^(x{300}){300}$"}),
    "tool": with_calls({"const": "x" * 50_000}, HERMES),
    "tool, in plain text": with_calls({"const": "x" * 50_000}, XML),
}


@pytest.fixture(scope="module")
def recording() -> tuple[GrammarCompiler, list[int]]:
    """A compiler whose tokenizer knows no text, and the lengths of the texts that it was given."""
    lengths: list[int] = []

    def encode(text: str) -> list[int]:
        lengths.append(len(text.encode()))
        return []

    return GrammarCompiler.from_vocab(VOCAB, [EOS], encode=encode), lengths


@pytest.mark.parametrize("wanted", LONG.values(), ids=LONG)
def test_a_forced_text_is_bounded_before_it_is_computed(
    wanted: ResponseFormat,
    recording: tuple[GrammarCompiler, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokenizer gets no more than a draft can hold, and the matcher is walked no further."""
    compiler, lengths = recording
    walked = 0
    forced_byte = TextMatcher._forced_byte

    def count(matcher: TextMatcher) -> bytes:
        nonlocal walked
        walked += 1
        return forced_byte(matcher)

    monkeypatch.setattr(TextMatcher, "_forced_byte", count)
    matcher = compiler.compile(wanted).result(120)()
    for _ in range(5):
        lengths.clear()
        walked = 0
        forced = matcher.forced_tokens()
        assert 1 <= len(forced) <= MAX_FORCED
        assert len(matcher.forced_tokens(3)) <= 3
        assert max(lengths) <= MAX_TEXT
        assert walked <= 200
        assert matcher.accept_token(forced[0])


def test_the_walk_of_a_forced_text_does_not_move_the_matcher(
    compiler: GrammarCompiler,
) -> None:
    wanted = ResponseFormat(grammar='root ::= "é☁" "x" ("true" | "tru" [0-9]) "end"')
    matcher = compiler.compile(wanted).result(60)()
    text = b""
    for token_id in "é☁xtru7end".encode():
        forced = b"".join(VOCAB[i] for i in matcher.forced_tokens())
        rest = "é☁xtru7end".encode().removeprefix(text)
        assert rest.startswith(forced)
        assert bool(forced) == (text[-3:] != b"tru")
        assert matcher.accept_token(token_id)
        text += bytes([token_id])
    assert matcher.forced_tokens() == []
    assert matcher.accept_token(EOS)


def test_a_long_text_is_cut_between_characters() -> None:
    words = Words(VOCAB, [EOS], (), lambda text: list(text.encode()))
    for start in ("", "a", "aa", "aaa"):
        cut = bytes(words((start + "☁" * MAX_TEXT).encode()))
        assert MAX_TEXT - 3 <= len(cut) <= MAX_TEXT
        assert cut.decode().strip("a☁") == ""
