"""Penalties against a loop over tokens, with tokens in flight, abandoned steps, drafts and
resumption.
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.own.sampling.helpers import (
    CPU,
    ToyModel,
    generate,
    generate_a_step_late,
    make_sampler,
    make_sequence,
    plan_item,
)
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.config.cache import LayerGroup
from tokenmill_worker.engines.own.kv.sizing import MemoryShape
from tokenmill_worker.engines.own.sampling.penalties import Histories, HistoryIndex
from tokenmill_worker.engines.own.sampling.transfer import to_device
from tokenmill_worker.engines.own.sequence import Sequence

VOCAB = 30


def naive(
    logits: list[float], prompt: list[int], output: list[int], params: SamplingParams
) -> list[float]:
    result = []
    for token_id, value in enumerate(logits):
        if token_id in prompt or token_id in output:
            value = (
                value / params.numbers.repetition_penalty
                if value > 0
                else value * params.numbers.repetition_penalty
            )
        if token_id in output:
            value -= params.presence_penalty
        result.append(value - params.frequency_penalty * output.count(token_id))
    return result


def penalised(
    histories: Histories, logits: torch.Tensor, sequences: list[Sequence]
) -> torch.Tensor:
    opened = [histories.open(s, s.num_output_tokens, ()) for s in sequences]
    lengths = np.array([s.num_output_tokens for s in sequences], np.int64)
    slots, prompts = np.array(opened, np.int64).T.copy()
    repeats = any(s.params.numbers.repetition_penalty != 1.0 for s in sequences)
    history = HistoryIndex.build(slots, lengths, prompts, repeats, CPU)
    numbers = [
        (s.params.presence_penalty, s.params.frequency_penalty, s.params.numbers.repetition_penalty)
        for s in sequences
    ]
    rows = to_device(np.arange(len(sequences)), CPU)
    histories.apply(logits, rows, history, torch.tensor(numbers))
    return logits


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
numbers = st.floats(-2.0, 2.0)
params_strategy = st.builds(
    SamplingParams,
    presence_penalty=st.one_of(st.just(0.0), numbers),
    frequency_penalty=st.one_of(st.just(0.0), numbers),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(params_strategy, tokens.filter(bool), tokens), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_every_row_is_penalised_as_by_a_loop_over_its_tokens(
    rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    logits = torch.from_numpy(
        np.random.default_rng(seed).normal(size=(len(rows), VOCAB)).astype(np.float32)
    )
    wanted = [
        naive(row.tolist(), prompt, output, params)
        for row, (params, prompt, output) in zip(logits, rows, strict=True)
    ]
    sequences = [
        make_sequence(params, tuple(prompt), tuple(output)) for params, prompt, output in rows
    ]
    got = penalised(Histories(CPU), logits, sequences)
    np.testing.assert_allclose(got.numpy(), np.array(wanted), atol=1e-5)


PENALISED = SamplingParams(
    temperature=0.0,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    ignore_eos=True,
)


def by_loop(num_tokens: int) -> list[int]:
    """Generate greedily with penalties from a loop over the tokens."""
    model, prompt, output = ToyModel(VOCAB, memory=1), [2, 3, 4], list[int]()
    for _ in range(num_tokens):
        scores = naive(model.row([*prompt, *output]).tolist(), prompt, output, PENALISED)
        output.append(int(np.argmax(np.array(scores, np.float32))))
    return output


def test_penalties_count_generated_tokens() -> None:
    got = generate(make_sampler(VOCAB), ToyModel(VOCAB, memory=1), [make_sequence(PENALISED)], 40)[
        0
    ]
    assert got == by_loop(40)
    unpenalised = SamplingParams(temperature=0.0, ignore_eos=True)
    assert (
        got
        != generate(
            make_sampler(VOCAB), ToyModel(VOCAB, memory=1), [make_sequence(unpenalised)], 40
        )[0]
    )


def test_penalties_count_tokens_in_flight() -> None:
    sampler, model, sequence = (
        make_sampler(VOCAB),
        ToyModel(VOCAB, memory=1),
        make_sequence(PENALISED),
    )
    assert generate_a_step_late(sampler, model, sequence, 30) == by_loop(30)


def test_an_abandoned_step_changes_no_penalty() -> None:
    sampler, model, sequence = (
        make_sampler(VOCAB),
        ToyModel(VOCAB, memory=1),
        make_sequence(PENALISED),
    )
    for _ in range(20):
        item = plan_item(sequence)
        wrong = torch.zeros(1, VOCAB)
        wrong[0, 5] = 9.0
        sampler.sample(wrong, [item]).finish()  # a step whose result is never committed
        tokens, _, _ = sampler.sample(model.logits([item]), [item]).finish()
        sequence.token_ids += tokens[0]
    assert sequence.output_ids == by_loop(20)


def test_released_histories_are_reused_without_their_old_counts() -> None:
    sampler, model = make_sampler(VOCAB), ToyModel(VOCAB, memory=1)
    for _ in range(40):
        sequence = make_sequence(PENALISED)
        assert generate(sampler, model, [sequence], 3)[0] == by_loop(3)
        sampler.release(sequence)
    assert len(sampler._histories) == 0


def test_histories_free_their_memory_with_the_last_sequence() -> None:
    histories = Histories(torch.device("cpu"))
    params = SamplingParams(presence_penalty=1.0)
    sequences = [Sequence(str(number), [1, 2, 3, 4], 2, params) for number in range(40)]
    for sequence in sequences:
        histories.open(sequence, 2, ())
    assert histories._outputs.numel()
    for sequence in sequences:
        histories.release(sequence)
    assert histories._outputs.numel() == histories._prompts.numel() == 0
    assert histories.open(sequences[0], 2, ()) == (0, 2)  # and begin anew


def test_histories_never_hold_more_than_the_memory_estimate_counts() -> None:
    num_seqs, longest = 20, 1500
    shape = MemoryShape(
        groups=(LayerGroup((0,), 1, 1),), block_size=16, kv_bytes=4, activation_bytes=4,
        hidden_size=1,
        intermediate_size=1, query_size=1, vocab_size=longest, max_num_tokens=1, max_num_rows=1,
        max_num_seqs=num_seqs, max_model_len=longest,
    )  # fmt: skip
    histories = Histories(torch.device("cpu"))
    for number in range(num_seqs):
        sequence = Sequence(
            str(number),
            list(range(longest // 2)),
            longest // 2,
            SamplingParams(presence_penalty=1.0),
        )
        sequence.token_ids += [1] * (longest // 2 - 1)
        histories.open(sequence, longest // 2 - 1, ())
    largest = max(histories._outputs.nbytes, histories._prompts.nbytes)
    assert histories._outputs.nbytes + histories._prompts.nbytes + largest <= shape.histories
