"""Tokens that a grammar forces: proposed as drafts, they change no answer."""

from typing import Any

import pytest
import torch

from tests.engine.sampling.grammar.test_masks import (
    EOS,
    JSON,
    VOCAB,
    WIDTH,
    make_sampler,
    run,
    structured,
)
from tests.engine.sampling.helpers import plan_item
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.engine.plan import NO_DRAFT, Draft
from tokenmill_worker.engine.sampling import GrammarCompiler, Sampler
from tokenmill_worker.engine.sequence import Sequence


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [EOS])


ORDER = ResponseFormat(regex=r"name: [0-9]{2}, (true|null) or \\[\\[(a|b)\\]\\]")
QUERY = ResponseFormat(grammar='root ::= "name: " [a-c] [a-c] ": true, " ("12" | "null") ", abc"')


@pytest.mark.parametrize("penalty", [0.0, 0.7])
@pytest.mark.parametrize("wanted", [JSON, ORDER, QUERY], ids=["JSON", "regex", "EBNF"])
def test_forced_tokens_change_nothing(
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


def test_reading_for_drafts_counts_as_time_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, sequence = make_sampler(compiler), structured(JSON)
    sequence.token_ids += sampler.forced_tokens(sequence).token_ids
    clock = iter([0.0, 9.0, 9.0, 9.0])  # forced_tokens, then the mask
    monkeypatch.setattr("time.thread_time", lambda: next(clock))
    sampler.forced_tokens(sequence)
    _, _, errors = sampler.sample(torch.zeros(1, WIDTH), [plan_item(sequence)]).finish()
    assert "too ambiguous" in errors[0]
