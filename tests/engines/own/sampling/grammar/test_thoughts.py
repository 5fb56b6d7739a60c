"""A budget ends thoughts in time, and a grammar binds behind them and nowhere else."""

import re

import pytest

from tests.engines.own.sampling.grammar.test_masks import EOS, VOCAB, WIDTH, Writer, make_sampler
from tests.engines.own.sampling.helpers import plan_item
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.contract.requests import Thoughts
from tokenmill_worker.engines.own.sampling import GrammarCompiler
from tokenmill_worker.engines.own.sequence import Sequence

START, END, MESSAGE = 1, 2, 3  # bytes that no text has
OPEN = Thoughts(end=(END,), closing=(END,), is_open=True)
FREE = Thoughts(end=(END,), closing=(END,), start=START)
CHANNELS = Thoughts(end=(4, MESSAGE), closing=(END, 4, MESSAGE), start=MESSAGE, is_open=True)
DATE = ResponseFormat(regex=r"[12]\d{3}-[01]\d")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [EOS])


class Thinker(Writer):
    """Begins with thoughts, and ends them only seldom."""

    def row(self, token_ids):
        values = super().row(token_ids)
        values[[4, MESSAGE]] -= 100.0
        values[END] -= 3.0
        if len(token_ids) == 3:
            values[START] += 100.0
        return values


def sequence_of(
    thoughts: Thoughts, budget: int | None, wanted: ResponseFormat | None = DATE, **params: object
) -> Sequence:
    sampling = SamplingParams(response_format=wanted, **params)  # type: ignore[arg-type]
    sequence = Sequence("r", [1, 2, 3], 3, sampling, seed=5)
    sequence.thoughts = Thoughts(
        end=thoughts.end, closing=thoughts.closing, start=thoughts.start,
        is_open=thoughts.is_open, budget=budget,
    )  # fmt: skip
    return sequence


def run(compiler: GrammarCompiler, sequence: Sequence, limit: int = 400, propose=None) -> list[int]:
    sampler, model = make_sampler(compiler), Thinker(WIDTH, memory=8)
    while EOS not in sequence.output_ids and sequence.num_output_tokens < limit:
        item = plan_item(sequence, propose(sequence) if propose else ())
        sampler.prepare([item])
        tokens, _, errors = sampler.sample(model.logits([item]), [item]).finish()
        assert errors == {}
        (new,) = tokens
        sequence.token_ids += new[: new.index(EOS) + 1] if EOS in new else new
    return sequence.output_ids


@pytest.mark.parametrize("budget", [0, 1, 7, 50])
@pytest.mark.parametrize("thoughts", [OPEN, FREE])
def test_a_budget_ends_thoughts_and_a_grammar_binds_the_text_behind_them(
    compiler: GrammarCompiler, thoughts: Thoughts, budget: int
) -> None:
    output = run(compiler, sequence_of(thoughts, budget))
    first = 0 if thoughts.is_open else 1
    end = output.index(END)
    assert first <= end <= first + budget
    assert EOS not in output[:end]
    text = b"".join(VOCAB[i] for i in output[end + 1 :]).decode()
    assert re.fullmatch(str(DATE.regex), text)


def test_without_thoughts_the_grammar_binds_from_the_first_token(
    compiler: GrammarCompiler,
) -> None:
    sequence = sequence_of(FREE, 3, logit_bias={START: -100.0})
    text = b"".join(VOCAB[i] for i in run(compiler, sequence)).decode()
    assert re.fullmatch(str(DATE.regex), text)


def test_a_budget_without_a_grammar_leaves_the_answer_free(compiler: GrammarCompiler) -> None:
    sequence = sequence_of(OPEN, 4, None, logit_bias={EOS: -100.0})
    output = run(compiler, sequence, limit=60)
    assert END in output[:5]
    assert len(output) == 60


@pytest.mark.parametrize("budget", [0, 1, 6])
def test_the_header_of_thoughts_is_not_counted_and_their_closing_is_complete(
    compiler: GrammarCompiler, budget: int
) -> None:
    sequence = sequence_of(CHANNELS, budget)
    if budget:
        sequence.token_ids += [65, 66, MESSAGE]
    output = run(compiler, sequence)
    begin = 3 + budget if budget else 0
    closing = [END, 4, MESSAGE] if budget else [4, MESSAGE]
    assert output[begin : begin + len(closing)] == closing
    text = b"".join(VOCAB[i] for i in output[begin + len(closing) :]).decode()
    assert re.fullmatch(str(DATE.regex), text)


@pytest.mark.parametrize("thoughts", [OPEN, FREE])
def test_thoughts_resumed_at_any_token_continue_the_same(
    compiler: GrammarCompiler, thoughts: Thoughts
) -> None:
    whole = run(compiler, sequence_of(thoughts, 9, temperature=0.8))
    for cut in range(len(whole)):
        resumed = sequence_of(thoughts, 9, temperature=0.8)
        resumed.token_ids += whole[:cut]
        assert run(compiler, resumed) == whole, cut


def test_right_and_wrong_drafts_change_no_thoughts(compiler: GrammarCompiler) -> None:
    for thoughts in (OPEN, FREE):
        truth = run(compiler, sequence_of(thoughts, 9, temperature=0.8))

        def propose(sequence: Sequence, truth: list[int] = truth) -> tuple[int, ...]:
            at = sequence.num_output_tokens
            coming = truth[at : at + 4]
            return tuple(coming if at % 3 else [*coming[:1], 77, EOS])

        drafted = sequence_of(thoughts, 9, temperature=0.8)
        assert run(compiler, drafted, propose=propose) == truth
