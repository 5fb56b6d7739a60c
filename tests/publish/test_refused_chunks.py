"""A call of the log raises because of one job's chunks: this job ends, and the others go on."""

import asyncio
import struct

import pytest

from tests.publish.support import Clock, FakeLog, admit, event
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.publish.publisher import Publisher
from tokenmill_worker.text.token_pieces import ByteLevelDetokenizer

LENGTH = FinishReason.LENGTH


class RefusingLog(FakeLog):
    """Refuses a call that has a chunk of the job `bad`, like a server that names no job."""

    error: BaseException = ValueError("INVALID chunks in a call of append")

    async def append(self, items):
        if any(item.chunk.job_id == "bad" for item in items):
            self.calls.append(items)
            raise self.error
        return await super().append(items)


@pytest.mark.parametrize("error", [ValueError("INVALID chunks"), struct.error("too large")])
@pytest.mark.parametrize("text", ["c", "cd"])
async def test_only_the_job_whose_chunks_are_refused_ends(error, text):
    log = RefusingLog()
    log.error = error
    publisher = Publisher(log, clock=Clock())
    for job_id in ("good", "bad", "fine"):
        publisher.open(await admit(job_id))
    names = ("good", "bad", "fine")
    report = await publisher.handle([event(text, name) for name in names])
    await publisher.flush()
    ((name, status),) = [(one.job_id, one.result.status) for one in report.finished]
    assert (name, status) == ("bad", JobStatus.FAILED)
    assert log.text("good") == log.text("fine") == text
    assert not publisher.has_pending
    report = await publisher.handle([event("e", name, end=LENGTH) for name in ("good", "fine")])
    assert [one.result.text for one in report.finished] == [f"{text}e"] * 2


async def test_a_log_unreachable_during_the_search_for_a_refused_job_is_called_again():
    log = RefusingLog()
    publisher = Publisher(log, clock=Clock())
    for job_id in ("good", "bad"):
        publisher.open(await admit(job_id))

    async def away(items):
        log.is_down = len(items) < 2
        return await RefusingLog.append(log, items)

    publisher._writer._log.append = away
    report = await publisher.handle([event("a", "good"), event("b", "bad")])
    assert (report.finished, publisher.has_pending) == ([], True)
    del publisher._writer._log.append
    log.is_down = False
    report = await publisher.flush()
    assert [one.job_id for one in report.finished] == ["bad"]
    await publisher.flush()
    assert log.text("good") == "a"
    assert not publisher.has_pending


async def test_a_cancelled_append_ends_no_job(monkeypatch):
    """Not even one whose text cannot be encoded: that shows at the next append."""
    monkeypatch.setattr(ByteLevelDetokenizer, "push", lambda _self, _token: "\ud800")
    log = RefusingLog()
    log.error = asyncio.CancelledError()
    publisher = Publisher(log, clock=Clock())
    publisher.open(await admit("bad"))
    with pytest.raises(asyncio.CancelledError):
        await publisher.handle([event("a", "bad")])
    assert publisher.has_pending
    assert len(log.calls) == 1
