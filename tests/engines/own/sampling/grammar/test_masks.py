"""Structured output: whatever the logits say, what is written obeys the grammar."""

import ast
import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.own.sampling.helpers import CPU, ToyModel, generate_a_step_late, plan_item
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.engines.own.requests import Prerequisites
from tokenmill_worker.engines.own.sampling import GrammarCompiler, Sampler
from tokenmill_worker.engines.own.sequence import Sequence

WORDS = [
    b'{"',
    b'": ',
    b", ",
    b"true",
    b"null",
    b"name",
    b"12",
    b'"}',
    b"[[",
    b"abc",
    "é".encode(),
    b"\n  ",
]
VOCAB = [bytes([i]) for i in range(256)] + WORDS + [b""]
EOS = len(VOCAB) - 1
WIDTH = len(VOCAB) + 5  # the logits have ids beyond the tokenizer's

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 7]}, "maxItems": 3},
        "open": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "tags", "open"],
    "additionalProperties": False,
}
JSON = ResponseFormat(json_schema=SCHEMA)
DATE = ResponseFormat(regex=r"[12]\d{3}-(0[1-9]|1[0-2])-[0-3]\d( (AM|PM))?")
SUM = ResponseFormat(grammar='root ::= term ("+" term){1,4}\nterm ::= [0-9]{1,3} | "(" root ")"')


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [EOS])


def make_sampler(compiler: GrammarCompiler | None) -> Sampler:
    return Sampler(WIDTH, CPU, frozenset({EOS}), compiler)


class Writer(ToyModel):
    """Random logits that favour ends, closing brackets and digits, so that outputs stay short."""

    def favour(self, values: torch.Tensor) -> None:
        values[EOS] += 6.0
        values[[ord(c) for c in '"}])0123456789']] += 4.0
        values[128:256] -= 100.0  # lone bytes of longer characters need not come in the right order


def structured(wanted: ResponseFormat, seed: int = 0, **params: object) -> Sequence:
    sampling = SamplingParams(response_format=wanted, **params)  # type: ignore[arg-type]
    return Sequence("r", [1, 2, 3], 3, sampling, seed=seed)


def run(
    sampler: Sampler, sequences: list[Sequence], limit: int = 400, proposer: object = None
) -> list[str]:
    model = Writer(WIDTH, memory=8)
    for _ in range(limit):
        active = [s for s in sequences if EOS not in s.output_ids]
        if not active:
            break
        items = [plan_item(s, *(proposer(s) if callable(proposer) else ())) for s in active]
        sampler.prepare(items)
        tokens, _, errors = sampler.sample(model.logits(items), items).finish()
        assert errors == {}
        for sequence, item, drawn in zip(active, items, tokens, strict=True):
            new = item.forced_ids + drawn
            sequence.token_ids += new[: new.index(EOS) + 1] if EOS in new else new
    return [text_of(s) for s in sequences]


def text_of(sequence: Sequence) -> str:
    assert sequence.output_ids[-1] == EOS, "no end within the limit"
    return b"".join(VOCAB[i] for i in sequence.output_ids).decode()


def assert_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags", "open"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 8
    assert type(person["age"]) is int
    assert 0 <= person["age"] <= 150
    assert len(person["tags"]) <= 3
    assert all(tag in ("a", "bc", 7) for tag in person["tags"])
    assert person["open"] in (True, False, None)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.9]),
)
def test_random_logits_give_texts_of_the_grammar(
    compiler: GrammarCompiler, seed: int, temperature: float, top_p: float
) -> None:
    sampler = make_sampler(compiler)
    options = {"temperature": temperature, "top_p": top_p}
    sequences = [
        structured(wanted, seed + i, **options) for i, wanted in enumerate((JSON, DATE, SUM))
    ]
    person, date, total = run(sampler, sequences)
    assert_person(person)
    assert re.fullmatch(str(DATE.regex), date)
    assert re.fullmatch(r"[0-9()+]+\+[0-9()+]+", total)
    ast.parse(re.sub(r"\b0+(?=\d)", "", total), mode="eval")  # brackets in pairs


def test_an_empty_schema_admits_objects_only(compiler: GrammarCompiler) -> None:
    for seed in range(5):
        (text,) = run(
            make_sampler(compiler),
            [structured(ResponseFormat(json_schema={}), seed, temperature=0.8)],
        )
        assert isinstance(json.loads(text), dict)


def test_free_sequences_beside_structured_ones_draw_the_same_tokens(
    compiler: GrammarCompiler,
) -> None:
    free = SamplingParams(temperature=0.9)
    together, alone = Sequence("r", [1, 2], 2, free, seed=4), Sequence("r", [1, 2], 2, free, seed=4)
    model, mixed, single = Writer(WIDTH), make_sampler(compiler), make_sampler(None)
    person = structured(JSON)
    for _ in range(12):
        items = [plan_item(person), plan_item(together)]
        tokens, _, errors = mixed.sample(model.logits(items), items).finish()
        assert not errors
        person.token_ids += tokens[0]
        together.token_ids += tokens[1]
        item = plan_item(alone)
        alone.token_ids += single.sample(model.logits([item]), [item]).finish()[0][0]
    assert together.output_ids == alone.output_ids


def test_right_and_wrong_drafts_change_no_structured_answer(compiler: GrammarCompiler) -> None:
    for seed in range(4):
        plain = structured(JSON, seed, temperature=0.8)
        run(make_sampler(compiler), [plain])
        truth, steps = plain.output_ids, list[int]()

        def propose(
            sequence: Sequence, truth: list[int] = truth, steps: list[int] = steps
        ) -> tuple[tuple[int, ...]]:
            position = sequence.num_output_tokens
            steps.append(position)
            coming = truth[position : position + 4]
            return (tuple(coming if len(steps) % 3 else [*coming[:1], (position * 7) % 256, EOS]),)

        drafted = structured(JSON, seed, temperature=0.8)
        run(make_sampler(compiler), [drafted], proposer=propose)
        assert drafted.output_ids == truth
        assert len(steps) < len(truth)


def test_preempted_resumed_and_abandoned_sequences_continue_the_same(
    compiler: GrammarCompiler,
) -> None:
    plain = structured(JSON, 3)
    run(make_sampler(compiler), [plain])
    sampler, model, moved = make_sampler(compiler), Writer(WIDTH, memory=8), structured(JSON, 3)
    for step in range(len(plain.output_ids)):
        item = plan_item(moved)
        sampler.prepare([plan_item(moved)])  # of a step that never came
        if step % 3 == 0:
            sampler.sample(model.logits([item]), [item]).finish()  # never committed
        moved.token_ids += sampler.sample(model.logits([item]), [item]).finish()[0][0]
        if step % 4 == 1:
            sampler.release(moved)
            moved.epoch += 1
    assert moved.output_ids == plain.output_ids
    resumed = structured(JSON, 3)
    resumed.token_ids += plain.output_ids[:10]
    assert run(make_sampler(compiler), [resumed]) == [text_of(plain)]


def test_a_resumed_text_that_breaks_the_grammar_fails_alone(compiler: GrammarCompiler) -> None:
    broken, good = structured(JSON), structured(DATE)
    broken.token_ids += list(b"hello")
    items = [plan_item(broken), plan_item(good)]
    tokens, _, errors = make_sampler(compiler).sample(torch.zeros(2, WIDTH), items).finish()
    assert list(errors) == [0]
    assert "is not in the grammar" in errors[0]
    assert len(tokens[1]) == 1


def test_a_step_launched_before_the_last_token_is_known_keeps_the_grammar(
    compiler: GrammarCompiler,
) -> None:
    plain = structured(JSON, 6, temperature=0.8)
    run(make_sampler(compiler), [plain])
    sampler, model, sequence = (
        make_sampler(compiler),
        Writer(WIDTH, memory=8),
        structured(JSON, 6, temperature=0.8),
    )
    assert (
        generate_a_step_late(sampler, model, sequence, plain.num_output_tokens) == plain.output_ids
    )


def test_a_token_in_flight_from_no_known_step_is_an_error(compiler: GrammarCompiler) -> None:
    sequence = structured(JSON)
    sequence.num_inflight = 1
    _, _, errors = (
        make_sampler(compiler).sample(torch.zeros(1, WIDTH), [plan_item(sequence)]).finish()
    )
    assert "has not reached the host" in errors[0]


def test_a_finished_grammar_ends_the_answer_before_min_tokens(compiler: GrammarCompiler) -> None:
    (text,) = run(make_sampler(compiler), [structured(ResponseFormat(regex="ab"), min_tokens=50)])
    assert text == "ab"
    (longer,) = run(
        make_sampler(compiler), [structured(ResponseFormat(regex="[ab]{1,40}"), min_tokens=20)]
    )
    assert len(longer) >= 20


def test_with_ignore_eos_a_finished_grammar_admits_only_end_tokens(
    compiler: GrammarCompiler,
) -> None:
    sampler, sequence = (
        make_sampler(compiler),
        structured(ResponseFormat(regex="ab"), ignore_eos=True),
    )
    for drafts in ((), (), (EOS,), (EOS, EOS), (97, EOS)):
        item = plan_item(sequence, drafts)
        tokens, _, errors = sampler.sample(Writer(WIDTH).logits([item]), [item]).finish()
        assert errors == {}
        sequence.token_ids += tokens[0]
    assert b"".join(VOCAB[i] for i in sequence.output_ids) == b"ab"
    assert sequence.output_ids[2:] == [EOS] * (sequence.num_output_tokens - 2)


def test_release_drops_the_matcher(compiler: GrammarCompiler) -> None:
    sampler, sequence = make_sampler(compiler), structured(DATE)
    run(sampler, [sequence])
    assert len(sampler._grammars) == 1
    sampler.prepare([plan_item(sequence)])
    sampler.release(sequence)
    sampler.release(sequence)
    assert len(sampler._grammars) == 0


def test_a_sequence_s_grammar_is_compiled_once_and_never_in_a_step(
    compiler: GrammarCompiler,
) -> None:
    """The compiler has dropped the grammar since; a new compilation would take as long."""
    sequence = structured(DATE)
    compiled = compiler.compile(DATE)
    compiled.result(60)
    Prerequisites(compiled).assign([sequence])

    def refuse(kind: str, source: str) -> object:
        raise AssertionError(f"{kind} is compiled in a step")

    forgetful = GrammarCompiler(compiler.tokenizer_info, compile_source=refuse)
    (date,) = run(make_sampler(forgetful), [sequence])
    assert re.fullmatch(str(DATE.regex), date)


def test_a_step_reads_only_the_new_tokens_of_a_sequence(compiler: GrammarCompiler) -> None:
    copied: list[int] = []

    class Tokens(list[int]):
        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            if isinstance(index, slice):
                copied.append(len(found))
            return found

    sequence = structured(ResponseFormat(regex="[ab]{60}"))
    sequence.token_ids = Tokens(sequence.token_ids)
    sampler, model = make_sampler(compiler), Writer(WIDTH, memory=8)
    for _ in range(50):
        items = [plan_item(sequence, ())]
        tokens, _, errors = sampler.sample(model.logits(items), items).finish()
        assert errors == {}
        sequence.token_ids += tokens[0]
        sampler._grammars.masks([plan_item(sequence, ())])
        assert max(copied[-1:], default=0) <= 1
