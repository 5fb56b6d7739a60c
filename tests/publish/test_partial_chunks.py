"""Tokens share a chunk, by `chunk_tokens` or since the log is behind; the answer is the same."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.publish.support import FakeLog, admit, event
from tokenmill.operations.stream_position import StreamPosition
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.publish.publisher import Publisher, PublishLimits

LENGTH = FinishReason.LENGTH


@pytest.fixture
def log():
    return FakeLog()


def publisher_of(log, chunk_tokens=4, wait_s=math.inf):
    return Publisher(log, limits=PublishLimits(chunk_tokens=chunk_tokens, chunk_wait_s=wait_s))


async def test_the_first_token_is_sent_at_once_and_later_ones_in_chunks(log):
    publisher = publisher_of(log)
    publisher.open(await admit())
    for letter in "abcdefghi":
        await publisher.handle([event(letter)])
    assert [(c.index, c.text) for c in log.chunks["job"]] == [(0, "a"), (1, "bcde"), (5, "fghi")]
    assert log.chunks["job"][1].text_ends == (1, 2, 3, 4)
    assert len(log.calls) == 3
    [finished] = (await publisher.handle([event("jk", end=LENGTH)])).finished
    assert [(c.index, c.text, c.finish_reason) for c in log.chunks["job"]][3:] == [
        (9, "jk", LENGTH)
    ]
    assert finished.result.text == log.text("job") == "abcdefghijk"
    assert log.published == log.chunks["job"]
    assert not publisher.has_pending


async def test_a_token_waits_for_its_chunk_no_longer_than_the_limit(log):
    publisher = publisher_of(log, chunk_tokens=100, wait_s=0.001)
    for name in ("early", "late"):
        publisher.open(await admit(name))
        await publisher.handle([event("a", job_id=name)])
        await publisher.handle([event("b", job_id=name)])
    await asyncio.sleep(0.01)
    await publisher.handle([])
    assert [log.text(name) for name in ("early", "late")] == ["ab", "ab"]
    assert not publisher.has_pending


async def test_with_no_wait_only_tokens_of_a_late_log_share_chunks(log):
    publisher = publisher_of(log, wait_s=0)
    publisher.open(await admit())
    for letter in "abc":
        await publisher.handle([event(letter)])
    log.is_down = True
    for letter in "defgh":
        await publisher.handle([event(letter)])
    log.is_down = False
    await publisher.flush()
    await publisher.handle([event("i")])
    assert [chunk.text for chunk in log.chunks["job"]] == ["a", "b", "c", "d", "efgh", "i"]


def chunks_of(log):
    return [(chunk.choice, chunk.text) for chunk in log.chunks["job"]]


async def test_piled_up_steps_share_chunks_and_tokens_of_one_step_do_not(log):
    publisher = publisher_of(log, chunk_tokens=1)
    publisher.open(await admit())
    await publisher.handle([event("a")])
    await publisher.handle([event("b"), event("cd"), event("e")])
    await publisher.handle([event("fg")])
    await publisher.handle([event(letter) for letter in "hijklmnopqrstuvwxyz"])
    assert [text for _, text in chunks_of(log)] == [
        "a",
        "bcde",
        "f",
        "g",
        "hijklmnopqrstuvw",
        "xyz",
    ]
    assert log.chunks["job"][1].text_ends == (1, 2, 3, 4)
    [finished] = (await publisher.handle([event("1"), event("2", end=LENGTH)])).finished
    assert (log.chunks["job"][-1].text, log.chunks["job"][-1].finish_reason) == ("12", LENGTH)
    assert finished.result.text == log.text("job") == "abcdefghijklmnopqrstuvwxyz12"


async def test_tokens_that_waited_for_an_unreachable_log_share_a_chunk(log):
    publisher = publisher_of(log, chunk_tokens=1)
    publisher.open(await admit())
    await publisher.handle([event("a")])
    log.is_down = True
    for letter in "bcdef":
        await publisher.handle([event(letter)])
    log.is_down = False
    await publisher.flush()
    await publisher.handle([event("g")])
    await publisher.handle([event("hi")])
    # b may be in the log already
    assert [text for _, text in chunks_of(log)] == ["a", "b", "cdef", "g", "h", "i"]


async def test_piled_up_tokens_of_several_choices_share_chunks_per_choice(log):
    publisher = publisher_of(log, chunk_tokens=1)
    publisher.open(await admit(n=2))
    await publisher.handle([event("a", choice=0), event("x", choice=1)])
    steps = [[event(first, choice=0), event(second, choice=1)] for first, second in ("by", "cz")]
    await publisher.handle([*steps[0], *steps[1]])
    await publisher.handle([event("d", choice=0), event("w", choice=1)])
    assert chunks_of(log) == [(0, "a"), (1, "x"), (0, "bc"), (1, "yz"), (0, "d"), (1, "w")]
    assert [(c.index, c.text_ends) for c in log.chunks["job"][2:4]] == [(1, (1, 2)), (1, (1, 2))]
    await publisher.handle([event("f", choice=1, end=LENGTH), event("e", choice=0)])
    await publisher.handle([event("g"), event("hi"), event("j")])
    assert chunks_of(log)[6:] == [(0, "e"), (1, "f"), (0, "ghij")]


async def test_a_flush_sends_a_partial_chunk(log):
    publisher = publisher_of(log)
    publisher.open(await admit())
    for letter in "abc":
        await publisher.handle([event(letter)])
    assert log.text("job") == "a"
    assert publisher.has_pending
    await publisher.flush()
    assert log.text("job") == "abc"
    assert not publisher.has_pending


async def test_a_closed_job_has_no_pending_chunk(log):
    publisher = publisher_of(log, wait_s=0)
    publisher.open(await admit())
    await publisher.handle([event("a")])
    publisher.close("job/1")
    assert not publisher.has_pending
    assert (await publisher.flush()).finished == []


async def test_tokens_of_several_choices_are_sent_singly_and_an_ended_choice_at_once(log):
    publisher = publisher_of(log)
    publisher.open(await admit(n=2))
    for first, second in ("ax", "by"):
        await publisher.handle([event(first, choice=0), event(second, choice=1)])
    assert chunks_of(log) == [(0, "a"), (1, "x"), (0, "b"), (1, "y")]
    assert [chunk.index for chunk in log.chunks["job"]] == [0, 0, 1, 1]
    await publisher.handle([event("cd", choice=0, end=LENGTH)])
    assert (log.chunks["job"][-1].text, log.chunks["job"][-1].finish_reason) == ("d", LENGTH)
    [finished] = (await publisher.handle([event("z", choice=1, end=LENGTH)])).finished
    assert [choice.text for choice in finished.result.choices] == ["abcd", "xyz"]


async def test_a_log_of_several_choices_that_lost_its_end_is_rewritten(log):
    publisher = publisher_of(log)
    publisher.open(await admit(n=2))
    await publisher.handle([event("a", choice=1), event("b", choice=0), event("c", choice=1)])
    await publisher.handle(
        [event("d", choice=0), event("e", choice=1, end=LENGTH), event("f", choice=0)]
    )
    log.truncate("job", 2)
    await publisher.handle([event("g", choice=0)])
    assert publisher.has_pending
    while publisher.has_pending:
        await publisher.flush()
    assert chunks_of(log) == [(0, "b"), (0, "d"), (0, "f"), (0, "g"), (1, "a"), (1, "c"), (1, "e")]
    assert log.chunks["job"][-1].finish_reason is LENGTH
    assert log.chunks["job"][0].usage is not None, (
        "the first entry tells what was measured at the first token"
    )
    assert not publisher.has_pending


LETTERS = ("abcdefghijkl", "ABCDEFGHIJKLMNOPQRST", "0123456789")


async def checkpoints(steps, log_so_far=()):
    """The log of a job of three choices, in checkpoints of two, whose tokens come so; each ends
    with its letters.
    """
    log = FakeLog()
    log.chunks["job"] = list(log_so_far)
    publisher = Publisher(log, limits=PublishLimits(checkpoint_tokens=7))
    job = await admit(n=3, stream=False, log=tuple(log_so_far))
    publisher.open(job)
    places = [choice.num_tokens for choice in job.answer.choices]
    for step in steps:
        events = []
        for choice in step:
            place, letters = places[choice], LETTERS[choice]
            if place < len(letters):
                places[choice] += 1
                events.append(
                    event(
                        letters[place],
                        choice=choice,
                        end=LENGTH if place + 1 == len(letters) else None,
                    )
                )
        await publisher.handle(events)
    return log.chunks["job"], places


steps_of = st.lists(st.lists(st.sampled_from((0, 1, 2)), min_size=1, max_size=6), max_size=30)


@given(steps_of, steps_of, st.data())
async def test_checkpoints_of_several_choices_continue_at_the_end_of_the_log(first, second, data):
    """Any worker goes on from any log that the server left.

    The log gets all tokens except those of a checkpoint that is not full.
    """
    before, _ = await checkpoints(first)
    log, places = await checkpoints(second, before[: data.draw(st.integers(0, len(before)))])
    for choice, letters in enumerate(LETTERS):
        mine = [chunk for chunk in log if chunk.choice == choice]
        text = "".join(chunk.text for chunk in mine)
        assert [chunk.index for chunk in mine] == [0, *(chunk.end for chunk in mine)][: len(mine)]
        assert letters.startswith(text)
        if places != [len(letters) for letters in LETTERS]:  # else the result replaces the log
            waits = places[choice] - len(text)
            assert waits == 0 if places[choice] == len(letters) else waits < 2


@pytest.mark.parametrize("after", range(12))
async def test_a_reader_that_begins_inside_a_chunk_gets_the_rest(log, after):
    publisher = publisher_of(log, chunk_tokens=5)
    publisher.open(await admit())
    for letter in "Was ist é?":
        await publisher.handle([event(letter)])
    [finished] = (await publisher.handle([event("!", end=LENGTH)])).finished
    cursor = StreamPosition("job", after)
    chunks_of = [
        chunks_of
        for chunk in [*log.chunks["job"], finished.final_chunk]
        for chunks_of in cursor.accept(chunk) or ()
    ]
    text = finished.result.text
    skipped = (0, *finished.result.choices[0].text_ends)[after]
    assert "".join(chunk.text for chunk in chunks_of) == text[skipped:]
    assert [token for chunk in chunks_of for token in chunk.token_ids] == list(
        finished.result.token_ids[after:]
    )
