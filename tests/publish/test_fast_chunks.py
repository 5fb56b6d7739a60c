"""The fast path for a plain next token gives the slow path's chunks at the same times."""

import asyncio
import random

import msgspec
import pytest

from tests.publish.support import Clock, FakeLog, admit, event
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.jobs import AppendFailures, ChunkAppend
from tokenmill_worker.publish.publisher import Publisher, PublishLimits

LENGTH = FinishReason.LENGTH
JOBS = ("short", "long")


def log_bytes(log: FakeLog, job_id: str) -> list[bytes]:
    return [
        msgspec.msgpack.encode(msgspec.structs.replace(chunk, job_id=""))
        for chunk in log.chunks.get(job_id, [])
    ]


async def step(publisher: Publisher, log: FakeLog, chance: random.Random, preemptions: int) -> None:
    """One that both jobs get; perhaps two that piled up, perhaps with drafts, perhaps while
    something goes wrong.
    """
    log.is_down, log.loses_replies = chance.random() < 0.15, chance.random() < 0.15
    if chance.random() < 0.1 and (end := min(len(log.chunks.get(job, ())) for job in JOBS)) > 1:
        length = chance.randrange(1, end)
        for job in JOBS:
            log.truncate(job, length)
    texts = [
        chance.choice(("a", "b", "é", "é".encode()[:1], "xy"))
        for _ in range(chance.choice((1, 1, 1, 2)))
    ]
    events = [event(text, job, preemptions=preemptions) for text in texts for job in JOBS]
    await publisher.handle(events)
    if chance.random() < 0.5:  # else nothing is tried for a while after a failure
        await publisher.flush()


@pytest.mark.parametrize("seed", range(40))
async def test_the_fast_and_the_slow_path_append_the_same_chunks_under_faults(seed):
    chance = random.Random(seed)
    log = FakeLog()
    limits = PublishLimits(max_appends=chance.choice((2, 4, 2_048)))
    publisher = Publisher(log, clock=Clock(), limits=limits)
    publisher.open(await admit("short"))
    publisher.open(await admit("long", stop=("\0 never said",)))
    preemptions = 0
    for _ in range(60):
        preemptions += chance.random() < 0.05
        await step(publisher, log, chance, preemptions)
    log.is_down = log.loses_replies = False
    while publisher.has_pending:
        await publisher.flush()
    ends = [event("z", job, end=LENGTH) for job in JOBS]
    results = {item.result.job_id: item.result for item in (await publisher.handle(ends)).finished}
    short, long = results["short"], results["long"]
    assert (short.choices, short.usage) == (long.choices, long.usage)
    assert short.usage.preemptions == preemptions
    assert "".join(chunk.text for chunk in log.chunks["short"]) == log.text("long")
    assert log.token_ids("short") == log.token_ids("long")


async def test_the_fast_and_the_slow_path_make_the_same_chunks():
    log = FakeLog()
    publisher = Publisher(log, clock=Clock())
    publisher.open(await admit("short", seed=1))
    publisher.open(await admit("long", seed=1, stop=("\0 never said",)))
    for text in ("a", "b", "cd", "é".encode()[:1], "é".encode()[1:], "e", "f"):
        await publisher.handle([event(text, job) for job in JOBS])
    await publisher.handle([event(text, job) for text in "ghi" for job in JOBS])
    await publisher.handle([event("j", job, end=LENGTH) for job in JOBS])
    assert log_bytes(log, "short") == log_bytes(log, "long")
    assert [chunk.text for chunk in log.chunks["short"]] == [
        "a",
        "b",
        "c",
        "d",
        "",
        "é",
        "e",
        "f",
        "ghi",
        "j",
    ]


class SlowLog(FakeLog):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def append(self, items: list[ChunkAppend]) -> AppendFailures:
        await self.may_answer.wait()
        return await super().append(items)


async def test_a_flush_waits_for_the_append_under_way():
    """Jobs are handed over after the flush: a later chunk would be refused."""
    log = SlowLog()
    log.may_answer.set()
    publisher = Publisher(log, clock=Clock())
    publisher.open(await admit())
    await publisher.handle([event("a")])
    log.may_answer.clear()
    handling = asyncio.create_task(publisher.handle([event("b")]))
    await asyncio.sleep(0)
    flushing = asyncio.create_task(publisher.flush())
    await asyncio.sleep(0.01)
    assert not flushing.done()
    log.may_answer.set()
    await flushing
    assert log.text("job") == "ab"
    await handling


async def test_a_stop_string_is_found_on_the_fast_path():
    log = FakeLog()
    publisher = Publisher(log, clock=Clock())
    publisher.open(await admit(stop=("cd",)))
    reports = [await publisher.handle([event(letter)]) for letter in "abcd"]
    assert [len(report.finished) for report in reports] == [0, 0, 0, 1]
    assert reports[-1].finished[0].result.text == log.text("job") == "ab"


async def test_the_fast_path_does_not_call_an_unreachable_log_during_its_pause():
    log = FakeLog()
    publisher = Publisher(log, clock=Clock())
    for job in JOBS:
        publisher.open(await admit(job))
    await publisher.handle([event("a", job) for job in JOBS])
    log.is_down = True
    await publisher.handle([event("b", "short")])
    await publisher.handle([event("b", "long")])
    assert len(log.calls) == 2
    log.is_down = False
    await publisher.flush()
    assert [log.text(job) for job in JOBS] == ["ab", "ab"]


async def test_preemptions_on_the_fast_path_are_counted():
    publisher = Publisher(FakeLog(), clock=Clock())
    publisher.open(await admit())
    for letter, preemptions in (("a", 0), ("b", 0), ("c", 2), ("d", 2)):
        await publisher.handle([event(letter, preemptions=preemptions)])
    [finished] = (await publisher.handle([event("", end=LENGTH)])).finished
    assert finished.result.usage.preemptions == 2


class BrokenOnce(FakeLog):
    """Fails once with an unexpected error, before it has written anything."""

    async def append(self, items: list[ChunkAppend]) -> AppendFailures:
        if len(self.calls) == 1:
            self.calls.append(items)
            raise RuntimeError("a mistake in the program")
        return await super().append(items)


async def test_chunks_of_a_failed_append_are_sent_again():
    log = BrokenOnce()
    publisher = Publisher(log, clock=Clock())
    publisher.open(await admit())
    await publisher.handle([event("a")])
    report = await publisher.handle([event("b")])
    await publisher.handle([event("c")])
    assert (log.text("job"), report.finished) == ("abc", [])
