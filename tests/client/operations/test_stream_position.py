"""The cursor alone: each token comes once and in order if chunks are cut, repeated or lost."""

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.operations.support import JOB, answer_of_several, tokens_and_text, words
from tokenmill.errors import ConfigurationError
from tokenmill.operations.stream_position import StreamPosition
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus, ScoredPrompt, Usage


def cut(num_tokens: int, borders: list[int]) -> list[Chunk]:
    edges = sorted({0, num_tokens, *(border % num_tokens for border in borders)})
    return [
        Chunk(job_id=JOB, index=a, token_ids=tuple(range(a, b)), text=words(a, b))
        for a, b in itertools.pairwise(edges)
    ]


def last(num_tokens: int) -> Chunk:
    return Chunk(
        job_id=JOB, index=num_tokens, status=JobStatus.SUCCEEDED, finish_reason=FinishReason.STOP
    )


def result_of(num_tokens: int) -> JobResult:
    ends = tuple(len(words(0, i + 1)) for i in range(num_tokens))
    choice = ChoiceResult(
        text=words(0, num_tokens) + "!",
        token_ids=tuple(range(num_tokens)),
        text_ends=ends,
        finish_reason=FinishReason.STOP,
    )
    return JobResult(
        job_id=JOB,
        status=JobStatus.SUCCEEDED,
        choices=(choice,),
        usage=Usage(completion_tokens=num_tokens),
    )


@given(
    st.integers(1, 30),
    st.lists(st.integers(0, 100)),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_tokens_are_yielded_once_in_order_for_any_arrival_of_messages(
    num_tokens: int, borders: list[int], rng: random.Random, ends_in_result: bool
) -> None:
    chunks = cut(num_tokens, borders)
    messages = [chunk for chunk in chunks for _ in range(rng.randint(0, 2))]  # lost, once, twice
    if rng.random() < 0.5:
        rng.shuffle(messages)
    cursor, received = StreamPosition(JOB), list[Chunk]()
    for message in messages:
        accepted = cursor.accept(message)
        if accepted is None:  # a gap: the log has everything up to this message
            logged = [chunk for chunk in chunks if chunk.end <= message.end]
            received += cursor.accept_log(
                logged[rng.randint(0, len([c for c in logged if c.end <= cursor.num_tokens])) :]
            )
            accepted = cursor.accept(message)
        assert accepted is not None
        received += accepted
    if ends_in_result:
        received += cursor.accept_result(result_of(num_tokens))
        text = words(0, num_tokens) + "!"
    else:
        received += cursor.accept_log(chunks)
        received += cursor.accept(last(num_tokens)) or []
        text = words(0, num_tokens)
    assert tokens_and_text(received) == (list(range(num_tokens)), text)
    assert cursor.is_over
    assert received[-1].status is JobStatus.SUCCEEDED
    assert [chunk.index for chunk in received] == sorted(
        {chunk.index for chunk in received if chunk.token_ids} | {num_tokens}
    )


@given(st.integers(1, 20), st.integers(0, 25), st.booleans())
def test_starting_after_a_token_yields_exactly_the_rest(
    num_tokens: int, after: int, is_over: bool
) -> None:
    cursor = StreamPosition(JOB, after)
    if is_over:
        received = list(cursor.accept_result(result_of(num_tokens)))
    else:
        received = [
            *cursor.accept_log(cut(num_tokens, list(range(num_tokens)))),
            *(cursor.accept(last(num_tokens)) or []),
        ]
    assert tokens_and_text(received)[0] == list(range(after, num_tokens))
    if is_over:
        assert tokens_and_text(received)[1] == (
            "" if after > num_tokens else words(after, num_tokens) + "!"
        )


def test_a_message_beyond_the_cursor_waits_for_the_log() -> None:
    cursor = StreamPosition(JOB)
    assert cursor.accept(Chunk(job_id=JOB, index=2, token_ids=(2,))) is None
    assert cursor.accept(last(3)) is None
    assert cursor.num_tokens == 0


def test_a_repeated_chunk_with_more_tokens_is_trimmed_to_the_new_tokens() -> None:
    """The server lost the last two chunks; the worker sends the same tokens again in one piece."""
    cursor = StreamPosition(JOB)
    received = list(cursor.accept_log(cut(4, [1, 2, 3])))
    again = Chunk(
        job_id=JOB, index=2, token_ids=(2, 3, 4, 5), text=words(2, 6), text_ends=(3, 6, 9, 12)
    )
    received += cursor.accept(again) or []
    assert tokens_and_text(received) == (list(range(6)), words(0, 6))
    assert cursor.accept(again) == []


def test_tokens_missing_at_a_log_s_beginning_come_from_the_result() -> None:
    cursor = StreamPosition(JOB)
    assert list(cursor.accept_log(cut(5, [1, 2, 3, 4])[3:])) == []
    assert tokens_and_text(list(cursor.accept_result(result_of(5)))) == (
        list(range(5)),
        words(0, 5) + "!",
    )


def two_choices() -> JobResult:
    choices = tuple(
        ChoiceResult(
            index=i, text=f"{name}0{name}1", token_ids=(10 * i, 10 * i + 1), text_ends=(2, 4),
            finish_reason=FinishReason.STOP,
        )
        for i, name in enumerate("ab")
    )  # fmt: skip
    return JobResult(job_id=JOB, status=JobStatus.SUCCEEDED, choices=choices)


@pytest.mark.parametrize("seen", range(5))
def test_the_end_of_the_log_may_fall_anywhere_among_several_choices(seen: int) -> None:
    live = [
        Chunk(job_id=JOB, index=0, choice=1, token_ids=(10,), text="b0", n=2),
        Chunk(
            job_id=JOB,
            index=1,
            choice=1,
            token_ids=(11,),
            text="b1",
            finish_reason=FinishReason.STOP,
            n=2,
        ),
        Chunk(job_id=JOB, index=0, choice=0, token_ids=(0,), text="a0", n=2),
        Chunk(job_id=JOB, index=1, choice=0, token_ids=(1,), text="a1", n=2),
    ][:seen]
    cursor = StreamPosition(JOB)
    received = [*cursor.accept_log(live), *cursor.accept_result(two_choices())]
    for i, text in enumerate(("a0a1", "b0b1")):
        mine = [chunk for chunk in received if chunk.choice == i and chunk.status is None]
        assert tokens_and_text(mine) == ([10 * i, 10 * i + 1], text)
        assert [chunk.finish_reason for chunk in mine if chunk.finish_reason] == [FinishReason.STOP]
        assert [chunk.index for chunk in mine if chunk.token_ids] == [0, 1]


def test_the_end_of_a_choice_without_a_token_is_yielded_once() -> None:
    cursor = StreamPosition(JOB)
    list(cursor.accept_log([Chunk(job_id=JOB, index=0, choice=1, token_ids=(1,), text="x", n=2)]))
    end = Chunk(
        job_id=JOB, index=1, choice=1, text="rest", finish_reason=FinishReason.CANCELLED, n=2
    )
    (received,) = cursor.accept(end) or [end]
    assert (received.text, received.position) == ("rest", "0.1e")
    assert cursor.accept(end) == []
    assert StreamPosition(JOB, received.position).accept(end) == []


def test_prompt_logprobs_are_yielded_with_the_first_token_only() -> None:
    prompt = ScoredPrompt((7, 8), (TokenLogprob(-0.5),))
    result = msgspec.structs.replace(result_of(3), prompt=prompt)
    found = list(StreamPosition(JOB).accept_result(result))
    assert [chunk.prompt for chunk in found] == [prompt, None, None, None]
    assert all(chunk.prompt is None for chunk in StreamPosition(JOB, 1).accept_result(result))
    chunk = Chunk(job_id=JOB, index=0, token_ids=(0, 1), text="ab", text_ends=(1, 2), prompt=prompt)
    rest = StreamPosition(JOB, 1).accept(chunk)
    assert rest is not None
    assert [(one.token_ids, one.prompt) for one in rest] == [((1,), None)]


def test_chunks_after_the_end_are_ignored() -> None:
    cursor = StreamPosition(JOB)
    list(cursor.accept_result(result_of(2)))
    assert cursor.accept(last(2)) == []
    assert list(cursor.accept_result(result_of(2))) == []


@given(st.integers(2, 20), st.data())
def test_a_reader_that_begins_inside_a_checkpoint_gets_the_rest_of_it(
    num_tokens: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, num_tokens))
    borders = data.draw(st.lists(st.integers(0, 100)))
    ends = [len(words(0, i + 1)) for i in range(num_tokens)]
    checkpoints = [
        msgspec.structs.replace(
            chunk,
            text_ends=tuple(
                end - len(words(0, chunk.index)) for end in ends[chunk.index : chunk.end]
            ),
        )
        for chunk in cut(num_tokens, borders)
    ]
    received = list(StreamPosition(JOB, start).accept_log(checkpoints))
    assert tokens_and_text(received) == (list(range(start, num_tokens)), words(start, num_tokens))
    assert [chunk.index for chunk in received[:1]] == ([start] if start < num_tokens else [])


def test_a_position_holds_the_place_of_each_choice() -> None:
    cursor = StreamPosition(JOB)
    result = answer_of_several([2, 1])
    received = list(cursor.accept_result(result))
    assert [chunk.position for chunk in received] == [
        "1.0",
        "2.0",
        "2e.0",
        "2e.1",
        "2e.1e",
        "2e.1e",
    ]
    for place, chunk in enumerate(received[:-1]):
        rest = list(StreamPosition(JOB, chunk.position).accept_result(result))
        assert rest == received[place + 1 :]
    assert [chunk.position for chunk in StreamPosition(JOB).accept_result(result_of(2))] == [
        "1",
        "2",
        "2",
    ]


def test_a_number_as_position_is_refused_for_several_choices() -> None:
    chunk = Chunk(job_id=JOB, index=3, token_ids=(1,), n=2)
    for takes in (
        lambda cursor: cursor.accept(chunk),
        lambda cursor: list(cursor.accept_log([chunk])),
    ):
        with pytest.raises(
            ConfigurationError, match="has several choices: starting_after must be the position"
        ):
            takes(StreamPosition(JOB, 3))
    with pytest.raises(ConfigurationError, match="several choices"):
        list(StreamPosition(JOB, 3).accept_result(two_choices()))
    assert StreamPosition(JOB, 0).accept(chunk) is None


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        "-1",
        -1,
        "1.",
        ".1",
        "1..2",
        "1e2",
        " 1",
        "1\n",
        "١",
        1.5,
        True,
        "1" * 20,
        ".".join("1" * 129),
    ],
)
def test_an_invalid_position_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="starting_after is the position of a chunk"):
        StreamPosition(JOB, value)


def test_a_chunk_of_an_impossible_choice_is_ignored() -> None:
    cursor = StreamPosition(JOB)
    for choice in (-1, 128, 1 << 40):
        assert cursor.accept(Chunk(job_id=JOB, index=0, choice=choice, token_ids=(1,))) == []
