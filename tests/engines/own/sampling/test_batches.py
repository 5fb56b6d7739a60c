"""A sequence's tokens do not depend on its batch mates, its place in the batch, or the schedule."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.own.sampling.helpers import (
    KINDS,
    ToyModel,
    generate,
    make_sampler,
    make_sequence,
    plan_item,
)
from tokenmill_worker.engines.own.sequence import Sequence

VOCAB = 97


def fresh(kind: int) -> Sequence:
    return make_sequence(KINDS[kind], prompt=(5, 6, kind + 7), seed=1000 + kind)


def alone(kind: int, num_tokens: int) -> list[int]:
    return generate(make_sampler(VOCAB), ToyModel(VOCAB), [fresh(kind)], num_tokens)[0]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=12), st.integers(0, 2**20))
def test_a_seed_gives_the_same_tokens_in_any_batch(kinds: list[int], shuffle: int) -> None:
    sampler, model = make_sampler(VOCAB), ToyModel(VOCAB)
    sequences = [fresh(kind) for kind in kinds]
    order = random.Random(shuffle)
    for _ in range(6):  # another composition and order at each step
        active = order.sample(sequences, order.randint(1, len(sequences)))
        generate(sampler, model, active, 1)
    for kind, sequence in zip(kinds, sequences, strict=True):
        assert sequence.output_ids == alone(kind, 6)[: sequence.num_output_tokens]


def test_a_sequence_released_and_readmitted_draws_the_same_tokens() -> None:
    for kind in range(len(KINDS)):
        sampler, model, sequence = make_sampler(VOCAB), ToyModel(VOCAB), fresh(kind)
        for _ in range(8):
            generate(sampler, model, [sequence], 1)
            sampler.release(sequence)
            sequence.epoch += 1
        assert sequence.output_ids == alone(kind, 8)[: sequence.num_output_tokens]


def test_a_resumed_sequence_continues_with_the_same_tokens() -> None:
    for kind in range(len(KINDS)):
        whole = alone(kind, 9)
        resumed = make_sequence(KINDS[kind], (5, 6, kind + 7), tuple(whole[:4]), seed=1000 + kind)
        if len(whole) == 9:
            assert generate(make_sampler(VOCAB), ToyModel(VOCAB), [resumed], 5)[0] == whole


def test_a_reused_row_has_its_new_owner_s_parameters() -> None:
    sampler, model = make_sampler(VOCAB), ToyModel(VOCAB)
    for kind in [*range(len(KINDS)), *reversed(range(len(KINDS)))]:
        sequence = fresh(kind)
        assert generate(sampler, model, [sequence], 4)[0] == alone(kind, 4)
        sampler.release(sequence)


def test_the_parameter_table_grows_with_the_number_of_sequences() -> None:
    sampler, model = make_sampler(VOCAB), ToyModel(VOCAB)
    sequences = [fresh(i % len(KINDS)) for i in range(150)]
    generate(sampler, model, sequences, 2)
    for i, sequence in enumerate(sequences):
        assert sequence.output_ids == alone(i % len(KINDS), 2)[: sequence.num_output_tokens]


def test_sampling_does_not_change_the_caller_s_logits() -> None:
    sampler = make_sampler(VOCAB)
    logits = torch.randn(len(KINDS), VOCAB)
    before = logits.clone()
    sampler.sample(logits, [plan_item(fresh(kind)) for kind in range(len(KINDS))]).finish()
    assert torch.equal(logits, before)


def test_an_empty_batch_samples_no_tokens() -> None:
    assert make_sampler(VOCAB).sample(torch.zeros(0, VOCAB), []).finish() == ((), (), {})
