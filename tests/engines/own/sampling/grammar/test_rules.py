"""Structured output with biased, banned and forced tokens: the format goes first, and bans of
words and tokens hold.
"""

import json
import re
from typing import Any

import pytest

from tests.engines.own.sampling.grammar.test_masks import (
    EOS,
    JSON,
    VOCAB,
    WIDTH,
    Writer,
    make_sampler,
    run,
    structured,
)
from tests.engines.own.sampling.helpers import generate_a_step_late, plan_item
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.engines.own.sampling import GrammarCompiler, Sampler
from tokenmill_worker.engines.own.sequence import Sequence

ABC = ResponseFormat(regex="[a-c]{4}(xyz)+")
A, B, C, X, Y = b"abcxy"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [EOS])


def test_json_keeps_its_format_with_no_repeat_ngram_size(compiler: GrammarCompiler) -> None:
    for seed in range(4):
        sequence = structured(
            JSON, seed, no_repeat_ngram_size=1, suppress_tokens=tuple(b"123"), temperature=0.8
        )
        (text,) = run(make_sampler(compiler), [sequence])
        assert json.loads(text).keys() == {"name", "age", "tags", "open"}
        assert not set(b"123") & set(sequence.output_ids)


def test_a_banned_repetition_is_allowed_only_if_the_format_admits_no_other_token(
    compiler: GrammarCompiler,
) -> None:
    sequence = structured(ABC, no_repeat_ngram_size=1, temperature=0.0)
    (text,) = run(make_sampler(compiler), [sequence])
    assert re.fullmatch(ABC.regex or "", text)
    assert set(text[:3]) == set("abc")  # each once, while one is left


def test_a_forced_token_is_forced_only_if_the_format_allows_it(compiler: GrammarCompiler) -> None:
    for wanted, first in ((B, B), (X, None)):
        sequence = structured(ABC, forced_bos_token_id=wanted, forced_eos_token_id=EOS)
        sequence.max_tokens = 3  # the format allows no end there
        run(make_sampler(compiler), [sequence])
        assert sequence.output_ids[0] == first or (
            first is None and sequence.output_ids[0] in {A, B, C}
        )
        assert sequence.output_ids[2] in {A, B, C}


def test_a_ban_of_every_allowed_token_fails_the_request(
    compiler: GrammarCompiler,
) -> None:
    sequence = structured(ABC, suppress_tokens=(A, B, C, VOCAB.index(b"abc")))
    item = plan_item(sequence)
    _, _, errors = make_sampler(compiler).sample(Writer(WIDTH).logits([item]), [item]).finish()
    assert "no token is allowed" in errors[0]


@pytest.mark.parametrize("wanted", [JSON, ABC], ids=["JSON", "regex"])
def test_drafts_and_late_tokens_change_no_answer_under_token_rules(
    compiler: GrammarCompiler, wanted: ResponseFormat
) -> None:
    rules: dict[str, Any] = {
        "no_repeat_ngram_size": 2, "bad_words_ids": ((A, B), (Y, X)),
        "sequence_bias": (((A,), 5.0), ((A, A), -9.0)),
    }  # fmt: skip
    for seed in range(3):
        plain, drafted, late = (structured(wanted, seed, **rules) for _ in range(3))
        run(make_sampler(compiler), [plain])
        sampler = make_sampler(compiler)

        def propose(sequence: Sequence, sampler: Sampler = sampler) -> Any:
            draft = sampler.forced_tokens(sequence)
            assert draft.num_certain == 0  # a ban may exclude it, so its logits count
            return draft.token_ids, ()

        run(sampler, [drafted], proposer=propose)
        assert drafted.output_ids == plain.output_ids
        count = len(plain.output_ids)
        model = Writer(WIDTH, memory=8)
        assert generate_a_step_late(make_sampler(compiler), model, late, count) == plain.output_ids


def test_edits_tokens_is_true_for_each_parameter_that_names_tokens() -> None:
    assert not SamplingParams(stop_token_ids=(3,), min_tokens=2).edits_tokens
    each: tuple[dict[str, Any], ...] = (
        {"logit_bias": {3: 1.0}}, {"bad_words_ids": ((3,),)}, {"sequence_bias": (((3,), 1.0),)},
        {"no_repeat_ngram_size": 1}, {"suppress_tokens": (3,)}, {"begin_suppress_tokens": (3,)},
        {"forced_bos_token_id": 0}, {"forced_eos_token_id": 0},
    )  # fmt: skip
    for params in each:
        assert SamplingParams(stop_token_ids=(4,), **params).edits_tokens
