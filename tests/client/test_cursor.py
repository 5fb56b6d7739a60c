"""The cursor alone: whatever is cut, repeated, lost or reordered on the way, each token is told once and in order."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_client.cursor import StreamCursor
from schemas.chunk import Chunk
from schemas.generation import FinishReason
from schemas.result import ChoiceResult, JobResult, JobStatus, Usage

JOB = "j"


def words(start: int, end: int) -> str:
    return "".join(f"<{i}>" for i in range(start, end))


def cut(num_tokens: int, borders: list[int]) -> list[Chunk]:
    edges = sorted({0, num_tokens, *(border % num_tokens for border in borders)})
    return [
        Chunk(job_id=JOB, index=a, token_ids=tuple(range(a, b)), text=words(a, b)) for a, b in itertools.pairwise(edges)
    ]


def last(num_tokens: int) -> Chunk:
    return Chunk(job_id=JOB, index=num_tokens, status=JobStatus.SUCCEEDED, finish_reason=FinishReason.STOP)


def result_of(num_tokens: int) -> JobResult:
    ends = tuple(len(words(0, i + 1)) for i in range(num_tokens))
    choice = ChoiceResult(
        text=words(0, num_tokens) + "!",
        token_ids=tuple(range(num_tokens)),
        text_ends=ends,
        finish_reason=FinishReason.STOP,
    )
    return JobResult(
        job_id=JOB, status=JobStatus.SUCCEEDED, choices=(choice,), usage=Usage(completion_tokens=num_tokens)
    )


def told_of(chunks: list[Chunk]) -> tuple[list[int], str]:
    return [token for chunk in chunks for token in chunk.token_ids], "".join(chunk.text for chunk in chunks)


@given(st.integers(1, 30), st.lists(st.integers(0, 100)), st.randoms(use_true_random=False), st.booleans())
def test_every_token_once_however_messages_arrive(
    num_tokens: int, borders: list[int], rng: random.Random, ends_in_result: bool
) -> None:
    chunks = cut(num_tokens, borders)
    messages = [chunk for chunk in chunks for _ in range(rng.randint(0, 2))]  # lost, once, twice
    if rng.random() < 0.5:
        rng.shuffle(messages)
    cursor, told = StreamCursor(JOB), list[Chunk]()
    for message in messages:
        accepted = cursor.accept(message)
        if accepted is None:  # a gap: the log has everything up to this message
            logged = [chunk for chunk in chunks if chunk.end <= message.end]
            told += cursor.accept_log(logged[rng.randint(0, len([c for c in logged if c.end <= cursor.next_index])) :])
            accepted = cursor.accept(message)
        assert accepted is not None
        told += accepted
    if ends_in_result:
        told += cursor.accept_result(result_of(num_tokens))
        text = words(0, num_tokens) + "!"
    else:
        told += cursor.accept_log(chunks)
        told += cursor.accept(last(num_tokens)) or []
        text = words(0, num_tokens)
    assert told_of(told) == (list(range(num_tokens)), text)
    assert cursor.is_over
    assert told[-1].status is JobStatus.SUCCEEDED
    assert [chunk.index for chunk in told] == sorted({chunk.index for chunk in told if chunk.token_ids} | {num_tokens})


@given(st.integers(1, 20), st.integers(0, 25), st.booleans())
def test_starting_after_tells_exactly_the_rest(num_tokens: int, after: int, is_over: bool) -> None:
    cursor = StreamCursor(JOB, after)
    if is_over:
        told = list(cursor.accept_result(result_of(num_tokens)))
    else:
        told = [*cursor.accept_log(cut(num_tokens, list(range(num_tokens)))), *(cursor.accept(last(num_tokens)) or [])]
    assert told_of(told)[0] == list(range(after, num_tokens))
    if is_over:
        assert told_of(told)[1] == words(min(after, num_tokens), num_tokens) + "!"


def test_a_message_beyond_the_cursor_waits_for_the_log() -> None:
    cursor = StreamCursor(JOB)
    assert cursor.accept(Chunk(job_id=JOB, index=2, token_ids=(2,))) is None
    assert cursor.accept(last(3)) is None
    assert cursor.next_index == 0


def test_chunks_cut_anew_after_a_loss_are_trimmed_to_what_is_new() -> None:
    """The server forgot the last two chunks; the worker sends the same tokens again in one piece."""
    cursor = StreamCursor(JOB)
    told = list(cursor.accept_log(cut(4, [1, 2, 3])))
    again = Chunk(job_id=JOB, index=2, token_ids=(2, 3, 4, 5), text=words(2, 6))
    told += cursor.accept(again) or []
    assert told_of(told) == (list(range(6)), words(0, 6))
    assert cursor.accept(again) == []


def test_a_log_that_lost_its_beginning_does_not_stop_a_late_reader() -> None:
    cursor = StreamCursor(JOB)
    told = list(cursor.accept_log(cut(5, [1, 2, 3, 4])[3:]))
    assert told_of(told)[0] == [3, 4]


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
def test_several_choices_are_told_once_each_wherever_the_log_ended(seen: int) -> None:
    live = [
        Chunk(job_id=JOB, index=0, choice=1, token_ids=(10,), text="b0"),
        Chunk(job_id=JOB, index=1, choice=1, token_ids=(11,), text="b1", finish_reason=FinishReason.STOP),
        Chunk(job_id=JOB, index=2, choice=0, token_ids=(0,), text="a0"),
        Chunk(job_id=JOB, index=3, choice=0, token_ids=(1,), text="a1"),
    ][:seen]
    cursor = StreamCursor(JOB)
    told = [*cursor.accept_log(live), *cursor.accept_result(two_choices())]
    for i, text in enumerate(("a0a1", "b0b1")):
        mine = [chunk for chunk in told if chunk.choice == i and chunk.status is None]
        assert told_of(mine) == ([10 * i, 10 * i + 1], text)
        assert [chunk.finish_reason for chunk in mine if chunk.finish_reason] == [FinishReason.STOP]
    assert [chunk.index for chunk in told if chunk.token_ids] == [0, 1, 2, 3]


def test_the_end_of_a_choice_without_a_token_is_told_once() -> None:
    cursor = StreamCursor(JOB)
    list(cursor.accept_log([Chunk(job_id=JOB, index=0, token_ids=(1,), text="x")]))
    end = Chunk(job_id=JOB, index=1, text="rest", finish_reason=FinishReason.CANCELLED)
    assert cursor.accept(end) == [end]
    assert cursor.accept(end) == []


def test_after_the_end_there_is_nothing() -> None:
    cursor = StreamCursor(JOB)
    list(cursor.accept_result(result_of(2)))
    assert cursor.accept(last(2)) == []
    assert list(cursor.accept_result(result_of(2))) == []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(0, 30))
def test_who_hangs_up_among_several_choices_gets_the_rest_from_the_result(order: list[int], left_at: int) -> None:
    """The log is gone by then: only the result can say in which order its choices' tokens were told."""
    tokens: list[list[int]] = [[], [], []]
    heard: list[list[int]] = [[], [], []]
    for index, choice in enumerate(order):
        tokens[choice].append(index)
        if index < left_at:
            heard[choice].append(index)
    choices = tuple(
        ChoiceResult(index=i, text="x" * len(ids), token_ids=tuple(ids), text_ends=tuple(range(1, len(ids) + 1)))
        for i, ids in enumerate(tokens)
    )
    result = JobResult(job_id=JOB, status=JobStatus.SUCCEEDED, choices=choices, order=tuple(order))
    for chunk in StreamCursor(JOB, min(left_at, len(order))).accept_result(result):
        heard[chunk.choice] += chunk.token_ids
    assert heard == tokens


@given(st.integers(2, 20), st.data())
def test_who_begins_in_the_middle_of_a_checkpoint_gets_its_rest(num_tokens: int, data: st.DataObject) -> None:
    """He has the beginning from a result in SQL, say, and takes it up from a log that was written in larger pieces."""
    start = data.draw(st.integers(0, num_tokens))
    borders = data.draw(st.lists(st.integers(0, 100)))
    ends = [len(words(0, i + 1)) for i in range(num_tokens)]
    checkpoints = [
        msgspec.structs.replace(
            chunk, text_ends=tuple(end - len(words(0, chunk.index)) for end in ends[chunk.index : chunk.end])
        )
        for chunk in cut(num_tokens, borders)
    ]
    told = list(StreamCursor(JOB, start).accept_log(checkpoints))
    assert told_of(told) == (list(range(start, num_tokens)), words(start, num_tokens))
    assert [chunk.index for chunk in told[:1]] == ([start] if start < num_tokens else [])


def one_by_one(order: list[int], from_index: int = 0) -> list[Chunk]:
    """A chunk per token; a token is 100 times its choice and its place."""
    places: dict[int, int] = {}
    chunks = []
    for index, choice in enumerate(order):
        place = places.get(choice, 0)
        places[choice] = place + 1
        ids, text = (100 * choice + place,), words(place, place + 1)
        chunks.append(Chunk(job_id=JOB, index=index, choice=choice, place=place, token_ids=ids, text=text))
    return chunks[from_index:]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.randoms(use_true_random=False))
def test_a_lost_end_may_be_made_again_in_another_order(order: list[int], rng: random.Random) -> None:
    """The server lost what a reader was told; another worker makes the same tokens of several choices, as they come."""
    told_until = rng.randint(0, len(order))
    kept = rng.randint(0, told_until)
    rest = order[kept:]
    rng.shuffle(rest)
    anew = one_by_one(order[:kept] + rest)
    cursor = StreamCursor(JOB)
    told = [told for chunk in one_by_one(order)[:told_until] for told in cursor.accept(chunk) or ()]
    for message in anew[kept:]:
        if rng.random() < 0.3:
            continue
        accepted = cursor.accept(message)
        if accepted is None:
            told += read_pages(cursor, anew[: message.end], rng.randint(1, 5))
        told += accepted or []
    told += read_pages(cursor, anew, 4)
    result = JobResult(
        job_id=JOB,
        status=JobStatus.SUCCEEDED,
        order=tuple(order[:kept] + rest),
        choices=tuple(
            ChoiceResult(
                index=i,
                text=words(0, order.count(i)),
                token_ids=tuple(range(100 * i, 100 * i + order.count(i))),
                text_ends=tuple(len(words(0, place + 1)) for place in range(order.count(i))),
                finish_reason=FinishReason.STOP,
            )
            for i in range(3)
        ),
    )
    told += cursor.accept_result(result)
    for choice in result.choices:
        mine = [chunk for chunk in told if chunk.choice == choice.index and chunk.status is None]
        assert told_of(mine) == (list(choice.token_ids), choice.text)
    assert [chunk.index for chunk in told if chunk.token_ids] == list(range(len(order)))


def read_pages(cursor: StreamCursor, log: list[Chunk], size: int) -> list[Chunk]:
    """As a client reads the log: from where the cursor says, page by page, from its start where that is torn."""
    told: list[Chunk] = []
    start = 0 if cursor.log_start == "-" else cursor.next_index
    for _ in range(1000):
        page = [chunk for chunk in log if chunk.end >= start][:size] if start else log[:size]
        told += cursor.accept_log(page)
        if cursor.is_torn:
            start = 0
        elif len(page) < size:
            return told
        else:
            start = page[-1].end + 1
    raise AssertionError("the log is read for ever")


def test_a_torn_log_without_its_beginning_is_taken_as_it_is() -> None:
    cursor = StreamCursor(JOB)
    told = [told for chunk in one_by_one([0, 1, 0, 1]) for told in cursor.accept(chunk) or ()]
    assert cursor.accept(one_by_one([0, 0, 0, 0, 1])[3]) is None
    assert cursor.log_start == "-"
    told += cursor.accept_log(one_by_one([0, 0, 0, 0, 1, 1, 1], 3))
    assert not cursor.is_torn
    assert [chunk.index for chunk in told] == list(range(7))
