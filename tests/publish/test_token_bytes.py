"""Log-probabilities name their tokens by bytes: those of the answer and of the prompt, in chunks
and in results, whichever worker ends the job.
"""

from typing import Any

import msgspec

from tests.publish.support import MODEL, Clock, FakeLog, admit, delivery_of, event
from tests.support.tokenizers import byte_level
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import AdmittedJob
from tokenmill_worker.publish.publisher import Publisher

LENGTH = FinishReason.LENGTH
EURO, END = "€".encode(), byte_level().special_tokens["<end>"]
PARAMS: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 1, "max_tokens": 3}


def sent(token_id: int, *top: int) -> TokenLogprob:
    """Return what the engine sends: ids alone."""
    return TokenLogprob(-0.5, tuple((other, -0.5) for other in top))


PROMPT = (sent(ord("i"), ord("i"), EURO[1]),)
STEPS = [
    event(EURO[:1], logprobs=(sent(EURO[0], EURO[0], END, ord("a")),)),
    event(EURO[1:2], logprobs=(sent(EURO[1], EURO[2], 10**6),)),
    event(EURO[2:], logprobs=(sent(EURO[2]),), end=LENGTH),
]
NAMED = (
    TokenLogprob(-0.5, STEPS[0].logprobs[0].top, b"\xe2", (b"\xe2", b"<end>", b"a")),
    TokenLogprob(-0.5, STEPS[1].logprobs[0].top, b"\x82", (b"\xac", b"")),
    TokenLogprob(-0.5, (), b"\xac"),
)
NAMED_PROMPT = (TokenLogprob(-0.5, PROMPT[0].top, b"i", (b"i", b"\x82")),)


async def published(log: FakeLog, num_steps: int = 3) -> JobResult | None:
    """Publish the job's first steps, and return its result if that is all of them."""
    publisher = Publisher(log)
    publisher.open(await admit(**PARAMS))
    await publisher.handle([event(prompt_logprobs=PROMPT)])
    for step in STEPS[:num_steps]:
        report = await publisher.handle([step])
    return report.finished[0].result if report.finished else None


async def continued(log: FakeLog, chunks: list[Chunk]) -> JobResult:
    """Return the result by a second worker, which reads these chunks from the log."""
    request = JobRequest(job_id="job", prompt="hi", params=SamplingParams(**PARAMS))
    delivery = delivery_of(request, tuple(chunks), token=2, attempt=2)
    job = InputProcessor(byte_level(), MODEL, clock=Clock()).process(delivery)
    assert isinstance(job, AdmittedJob)
    publisher = Publisher(log)
    publisher.open(job)
    done = job.answer.num_tokens
    steps = [event(one.token_ids, logprobs=one.logprobs, end=one.finish_reason, token=2)
             for one in STEPS[done:]]  # fmt: skip
    for step in steps:
        report = await publisher.handle([step])
    return report.finished[0].result


async def test_chunks_and_the_result_have_the_bytes_of_each_token():
    log = FakeLog()
    result = await published(log)
    assert result is not None
    assert result.logprobs == NAMED
    assert result.prompt is not None
    assert result.prompt.logprobs == NAMED_PROMPT
    chunks = log.chunks["job"]
    assert (
        tuple(entry for chunk in chunks for entry in chunk.logprobs or ()) == NAMED[: len(chunks)]
    )
    assert chunks[0].prompt == result.prompt


async def test_a_job_that_another_worker_ends_has_the_same_bytes():
    whole = await published(FakeLog())
    assert whole is not None
    for num_steps in (1, 2):
        log = FakeLog()
        await published(log, num_steps)
        result = await continued(log, log.chunks["job"])
        assert result.choices == whole.choices
        assert result.prompt == whole.prompt


async def test_a_log_without_bytes_gets_them_when_the_job_is_continued():
    log = FakeLog()
    await published(log, 1)
    [chunk] = log.chunks["job"]
    assert chunk.prompt is not None
    bare = msgspec.structs.replace(
        chunk,
        logprobs=STEPS[0].logprobs,
        prompt=msgspec.structs.replace(chunk.prompt, logprobs=PROMPT),
    )
    log.chunks["job"] = [bare]
    result = await continued(log, [bare])
    assert result.logprobs == NAMED
    assert result.prompt is not None
    assert result.prompt.logprobs == NAMED_PROMPT
