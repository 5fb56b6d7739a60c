"""The log is away, slow, too short or another's: no chunk comes twice or out of order."""

import random

import pytest

from tests.publish.support import Clock, FakeLog, admit, event
from tokenmill.operations.stream_position import StreamPosition
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.jobs import AdmittedJob, CancelOrder
from tokenmill_worker.publish.publisher import Publisher, PublishLimits

LENGTH = FinishReason.LENGTH


@pytest.fixture
def log():
    return FakeLog()


@pytest.fixture
def publisher(log):
    return Publisher(log, clock=Clock())


async def test_a_job_that_another_worker_owns_is_dropped_at_once(publisher, log):
    for job_id in ("mine", "gone"):
        publisher.open(await admit(job_id))
    log.lost.add("gone")
    report = await publisher.handle([event("abc", "gone"), event("x", "mine")])
    assert [delivery.job_id for delivery in report.lost] == ["gone"]
    assert "gone/1" not in publisher._running
    assert log.text("mine") == "x"
    assert (await publisher.handle([event("d", "gone", end=LENGTH)])).finished == []
    assert len(log.calls) == 1


async def test_a_job_lost_with_its_last_token_is_not_finished(publisher, log):
    publisher.open(await admit())
    log.lost.add("job")
    report = await publisher.handle([event("a", end=LENGTH)])
    assert (report.finished, [delivery.job_id for delivery in report.lost]) == ([], ["job"])


async def test_a_cancel_in_the_log_s_reply_is_ordered_once(publisher, log):
    publisher.open(await admit())
    log.cancelled.add("job")
    first = await publisher.handle([event("ab")])
    second = await publisher.handle([event("c")])
    assert (first.cancel, second.cancel) == ([CancelOrder("job/1", FinishReason.CANCELLED)], [])
    [finished] = (await publisher.handle([event("", end=FinishReason.CANCELLED)])).finished
    assert (finished.result.status, finished.result.text) == (JobStatus.CANCELLED, "abc")


async def test_chunks_that_the_server_lost_are_sent_again(publisher, log):
    publisher.open(await admit())
    await publisher.handle([event("abcd")])
    received = list(log.chunks["job"])
    log.truncate("job", 1)
    report = await publisher.handle([event("e")])  # the gap shows
    assert (report.lost, publisher.has_pending) == ([], True)
    await publisher.handle([event("f")])
    assert log.chunks["job"][: len(received)] == received
    assert log.text("job") == "abcdef"
    assert [c.index for c in log.chunks["job"]] == list(range(6))
    assert not publisher.has_pending


async def test_a_gap_is_logged_once_for_several_chunks(publisher, log, caplog):
    publisher.open(await admit())
    await publisher.handle([event("ab")])
    log.truncate("job", 1)
    with caplog.at_level("WARNING"):
        await publisher.handle([event("cdefg")])
    assert [record.getMessage() for record in caplog.records] == [
        "The log of job job ends with entry 1, not 2; the rest is appended again"
    ]
    await publisher.flush()
    assert log.text("job") == "abcdefg"


async def test_chunks_keep_their_order_while_the_log_is_unreachable(publisher, log):
    for job_id in ("a", "b"):
        publisher.open(await admit(job_id))
    await publisher.handle([event("1", "a"), event("1", "b")])
    log.is_down = True
    await publisher.handle([event("2", "a")])
    await publisher.handle([event("3", "a"), event("2", "b")])
    assert publisher.has_pending
    assert publisher.num_unlogged == 3
    log.is_down = False
    await publisher.flush()
    assert (log.text("a"), log.text("b")) == ("123", "12")
    assert not publisher.has_pending
    assert publisher.num_unlogged == 0


async def test_an_unreachable_log_is_not_called_at_every_step(publisher, log):
    publisher.open(await admit())
    log.is_down = True
    for letter in "abcdefgh":
        await publisher.handle([event(letter)])
    assert len(log.calls) < 4


async def test_a_job_that_ends_while_the_log_is_unreachable_is_reported(publisher, log):
    publisher.open(await admit())
    log.is_down = True
    [finished] = (await publisher.handle([event("ab", end=LENGTH)])).finished
    assert finished.result.text == "ab"
    assert finished.final_chunk.index == 2
    assert not publisher.has_pending


async def test_chunks_repeated_after_a_lost_reply_are_logged_once(publisher, log):
    publisher.open(await admit(n=2))
    log.loses_replies = True
    await publisher.handle([event("ab", choice=0), event("x", choice=1, end=LENGTH)])
    log.loses_replies = False
    await publisher.flush()
    await publisher.handle([event("c", choice=0)])
    assert (log.text("job", 0), log.text("job", 1)) == ("abc", "x")
    assert [(c.choice, c.index) for c in log.published] == [(0, 0), (0, 1), (1, 0), (0, 2)]


async def test_a_repeated_checkpoint_has_the_same_tokens(log):
    """Tokens that come in the meantime must not move into a chunk that may have been logged."""
    publisher = Publisher(log, limits=PublishLimits(checkpoint_tokens=2), clock=Clock())
    publisher.open(await admit(stream=False, n=2))
    log.loses_replies = True
    await publisher.handle([event("a", choice=0), event("x", choice=1)])
    log.loses_replies = False
    await publisher.handle([event("b", choice=0), event("y", choice=1)])
    await publisher.flush()
    assert (log.text("job", 0), log.text("job", 1)) == ("ab", "xy")
    sent = [item.chunk for call in log.calls for item in call]
    assert len({(c.choice, c.index, c.end, c.text) for c in sent}) == len(
        {(c.choice, c.index) for c in sent}
    )


async def test_a_long_backlog_is_sent_in_bounded_calls_and_in_order(log):
    publisher = Publisher(log, limits=PublishLimits(max_appends=10, max_unlogged=30), clock=Clock())
    for job_id in ("a", "b"):
        publisher.open(await admit(job_id))
    log.is_down = True
    await publisher.handle([event("0123456789ABCDEF", "a"), event("0123456789ABCDEF", "b")])
    assert publisher.is_full
    log.is_down = False
    log.calls.clear()
    while publisher.has_pending:
        await publisher.flush()
    assert max(len(call) for call in log.calls) <= 10
    assert log.text("a") == log.text("b") == "0123456789ABCDEF"
    assert not publisher.is_full


async def test_the_reply_for_a_job_closed_during_the_call_is_ignored(log):
    publisher = Publisher(log, clock=Clock())

    class Closing(FakeLog):
        async def append(self, items):
            publisher.close("job/1")
            return await super().append(items)

    publisher._writer._log = Closing()
    publisher.open(await admit())
    report = await publisher.handle([event("a", end=LENGTH)])
    assert (report.finished, report.lost) == ([], [])
    assert not publisher.has_pending


async def test_the_reply_for_a_job_reopened_during_the_call_is_ignored():
    class Reopening(FakeLog):
        again: AdmittedJob | None = None

        async def append(self, items):
            replies = await super().append(items)
            if self.again is not None:
                opened.open(self.again)
            return replies

    log = Reopening()
    opened = publisher = Publisher(log, clock=Clock())
    publisher.open(await admit())
    log.again = await admit()
    report = await publisher.handle([event("a", end=LENGTH)])
    assert report.finished == []
    assert "job/1" in publisher._running
    log.again = None
    [finished] = (await publisher.handle([event("b", end=LENGTH)])).finished
    assert finished.result.text == "b"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stream", [True, False])
async def test_under_random_faults_the_log_equals_the_result(seed, stream):
    """Random steps under random faults: at the end log and result agree, and every token is in the
    log once. Of an answer without subscribers the log may lack the end.
    """
    draw = random.Random(seed)
    log = FakeLog()
    publisher = Publisher(
        log, limits=PublishLimits(checkpoint_tokens=5, max_appends=7), clock=Clock()
    )
    n = draw.choice([1, 1, 3])
    publisher.open(await admit(n=n, stream=stream, stop=("zz",)))
    finished = []
    for step in range(60):
        log.is_down, log.loses_replies = draw.random() < 0.2, draw.random() < 0.2
        if draw.random() < 0.1 and log.chunks.get("job"):
            log.truncate("job", draw.randrange(len(log.chunks["job"]) + 1))
        text = "".join(draw.choices("abéz", k=draw.randrange(4)))
        events = [event(text, choice=c) for c in range(n)]
        finished += (
            await (publisher.flush() if draw.random() < 0.5 else publisher.handle(()))
        ).finished
        finished += (await publisher.handle(events if step % 2 else ())).finished
    log.is_down = log.loses_replies = False
    while publisher.has_pending:
        await publisher.flush()
    if not finished:
        finished += (
            await publisher.handle([event("q", choice=c, end=LENGTH) for c in range(n)])
        ).finished
        assert [c.index for c in log.chunks["job"]] == sorted({c.index for c in log.chunks["job"]})
        for choice in finished[0].result.choices:
            ids = log.token_ids("job", choice.index)
            assert choice.text.startswith(log.text("job", choice.index))
            assert choice.token_ids[: len(ids)] == ids
            assert len(ids) == len(choice.token_ids) or not stream
    assert len(finished) == 1


@pytest.mark.parametrize(("n", "collected"), [(1, "ax"), (2, "ax"), (2, "axb"), (3, "ax")])
async def test_text_held_back_while_the_log_was_unreachable_is_logged(publisher, log, n, collected):
    """Each of several choices has an end of its own, in a chunk that this log never received."""
    publisher.open(await admit(n=n, stop=("xyz",)))
    await publisher.handle([event(collected[:2], choice=0)])
    if collected[2:]:
        await publisher.handle([event(collected[2:], choice=1)])
    log.is_down = True
    ends = [event("", choice=choice, end=FinishReason.CANCELLED) for choice in range(n)]
    [finished] = (await publisher.handle(ends)).finished
    cursor = StreamPosition("job")
    received = [received for chunk in log.chunks["job"] for received in cursor.accept(chunk) or ()]
    last = cursor.accept(finished.final_chunk)
    assert (last is None) == (n > 1)
    received += cursor.accept_result(finished.result) if last is None else last
    texts = [
        "".join(chunk.text for chunk in received if chunk.choice == choice) for choice in range(n)
    ]
    assert texts == [choice.text for choice in finished.result.choices]
    assert texts[0] == "ax"
    assert cursor.is_over


FAILURE = {"end": FinishReason.ERROR, "error": "boom", "error_code": "engine_error"}


async def test_late_events_of_a_lost_delivery_are_ignored_by_the_next(publisher, log):
    publisher.open(await admit())
    await publisher.handle([event("ab")])
    publisher.close("job/1")
    publisher.open(await admit(log=tuple(log.chunks["job"]), token=2))
    report = await publisher.handle([event("X"), event("", end=FinishReason.CANCELLED)])
    assert (report.finished, log.text("job")) == ([], "ab")
    [finished] = (await publisher.handle([event("cd", end=LENGTH, token=2)])).finished
    assert (finished.result.text, finished.token) == ("abcd", 2)


async def test_a_job_to_be_retried_has_no_pending_partial_chunk(log):
    publisher = Publisher(log, limits=PublishLimits(chunk_tokens=4, chunk_wait_s=0), clock=Clock())
    publisher.open(await admit())
    await publisher.handle([event("a")])
    report = await publisher.handle([event("b"), event("", **FAILURE)])
    assert len(report.retry) == 1
    assert not publisher.has_pending
    assert (await publisher.flush()).finished == []
    assert log.text("job") == "a"


async def test_a_job_that_failed_while_the_log_was_unreachable_has_no_pending_chunk(publisher, log):
    publisher.open(await admit())
    log.is_down = True
    await publisher.handle([event("a")])
    assert len((await publisher.handle([event("b"), event("", **FAILURE)])).retry) == 1
    assert (publisher.has_pending, publisher.num_unlogged) == (False, 0)
