"""Chunks have the thoughts apart from the text, for any cut, order and reader."""

import math

import pytest

from tests.input.test_input_processor_reasoning import END, HI, processor_of
from tests.publish.support import FakeLog, delivery_of
from tests.support.tokenizers import thinking
from tokenmill.operations.stream_position import StreamPosition
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.jobs import AdmittedJob, FinishedJob
from tokenmill_worker.publish.publisher import Publisher, PublishLimits

IDS = thinking().encode("<think>\nHm é.</think>\n\nYes é!")


async def published(chunk_tokens: int, n: int = 1, stream: bool = True):
    log = FakeLog()
    publisher = Publisher(
        log, limits=PublishLimits(chunk_tokens=chunk_tokens, chunk_wait_s=math.inf)
    )
    request = JobRequest(job_id="job", messages=HI, params=SamplingParams(n=n), stream=stream)
    job = processor_of().process(delivery_of(request))
    assert isinstance(job, AdmittedJob)
    publisher.open(job)
    finished: list[FinishedJob] = []
    for place, token_id in enumerate(IDS):
        end = FinishReason.STOP if place == len(IDS) - 1 else None
        events = [
            TokenEvent(
                request_id=job.request_id, choice=choice, token_ids=(token_id,), finish_reason=end
            )
            for choice in range(n)
        ]
        finished += (await publisher.handle(events)).finished
    (one,) = finished
    return log.chunks.get("job", []), one


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [1, 5])
async def test_chunks_with_thoughts_join_to_the_result(chunk_tokens: int, n: int) -> None:
    chunks, finished = await published(chunk_tokens, n)
    for choice in finished.result.choices:
        assert (choice.reasoning, choice.text) == ("Hm é.", "Yes é!")
        own = [chunk for chunk in [*chunks, finished.final_chunk] if chunk.choice == choice.index]
        assert "".join(chunk.reasoning for chunk in own) == choice.reasoning
        assert "".join(chunk.text for chunk in own) == choice.text
    assert finished.result.reasoning == "Hm é."
    assert finished.result.usage.reasoning_tokens == n * (IDS.index(END) + 1)


@pytest.mark.parametrize("after", range(len(IDS) + 1))
@pytest.mark.parametrize("source", ["log", "result"])
async def test_a_reader_that_begins_at_any_token_gets_the_remaining_thoughts_and_text(
    after: int, source: str
) -> None:
    chunks, finished = await published(5)
    (choice,) = finished.result.choices
    cursor = StreamPosition("job", after)
    received = (
        list(cursor.accept_result(finished.result))
        if source == "result"
        else [t for c in [*chunks, finished.final_chunk] for t in cursor.accept(c) or ()]
    )
    ends = (0, *choice.reasoning_ends)
    thought = ends[min(after, len(ends) - 1)]
    text = (0, *choice.text_ends)[after]
    assert "".join(chunk.reasoning for chunk in received) == choice.reasoning[thought:]
    assert "".join(chunk.text for chunk in received) == choice.text[text:]
    assert [t for chunk in received for t in chunk.token_ids] == list(IDS[after:])
