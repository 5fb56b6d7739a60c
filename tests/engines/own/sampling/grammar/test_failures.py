"""A grammar that fails in a step ends its own sequence alone, and says who is to blame."""

import pytest
import torch

from tests.engines.own.sampling.grammar.test_masks import (
    DATE,
    EOS,
    VOCAB,
    WIDTH,
    make_sampler,
    structured,
)
from tests.engines.own.sampling.helpers import plan_item
from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engines.own.plan import RequestFault
from tokenmill_worker.engines.own.sampling import GrammarCompiler
from tokenmill_worker.engines.own.sampling.grammar import masks as structured_output

# {"a": {"a": …: a text without an end must follow
ENDLESS: dict[str, object] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/items"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [EOS])


def test_a_grammar_over_the_limit_for_one_token_fails_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "TOKEN_LIMIT_S", 0.01)
    ambiguous = structured(ResponseFormat(grammar="root ::= s\ns ::= s s | s s s | [a-z]"))
    plain = structured(ResponseFormat(regex="[a-z]{1,2000}"))
    sampler, letters = make_sampler(compiler), torch.full((2, WIDTH), -100.0)
    letters[:, ord("a") : ord("z")] = 0.0
    errors: dict[int, str] = {}
    for _ in range(500):
        items = [plan_item(ambiguous), plan_item(plain)]
        tokens, _, errors = sampler.sample(letters.clone(), items).finish()
        if errors:
            break
        for sequence, new in zip((ambiguous, plain), tokens, strict=True):
            sequence.token_ids += new
    assert list(errors) == [0]
    assert "too ambiguous" in errors[0]


def test_a_grammar_over_the_limit_for_all_its_tokens_fails_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token stays below the limit of one; together they are too much."""
    wanted, sampler = ResponseFormat(regex="[a-z]{1,2000}"), make_sampler(compiler)
    logits = torch.full((1, WIDTH), -100.0)
    logits[:, ord("a") : ord("z")] = 0.0
    sampler.sample(logits.clone(), [plan_item(structured(wanted))]).finish()  # compiles it
    now = iter(range(10**6))
    monkeypatch.setattr("time.thread_time", lambda: next(now) / 10)
    sequence = structured(wanted)
    errors: dict[int, str] = {}
    while not errors:
        tokens, _, errors = sampler.sample(logits.clone(), [plan_item(sequence)]).finish()
        sequence.token_ids += tokens[0]
    assert 10 < sequence.num_output_tokens < 50
    assert "too ambiguous: one token takes more than 0.01 s" in errors[0]


def test_a_dead_end_is_the_request_s_error_and_a_foreign_token_the_engine_s(
    compiler: GrammarCompiler,
) -> None:
    dead = structured(ResponseFormat(grammar='root ::= "a" b\nb ::= b "x"'))
    ended = structured(ResponseFormat(json_schema={"type": "array", "items": ENDLESS}))
    broken = structured(DATE)
    dead.token_ids += b"a"
    ended.token_ids += b"[{"
    broken.token_ids += b"hello"
    sampler = make_sampler(compiler)
    tokens, _, _ = sampler.sample(torch.zeros(1, WIDTH), [plan_item(ended)]).finish()
    ended.token_ids += tokens[0]
    items = [plan_item(sequence) for sequence in (dead, ended, broken)]
    _, _, errors = sampler.sample(torch.zeros(3, WIDTH), items).finish()
    assert [isinstance(errors[i], RequestFault) for i in range(3)] == [True, True, False]
    assert "no token is allowed" in errors[0]
    assert "the text that must follow is too long" in errors[1]
