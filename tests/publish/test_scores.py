"""Log-probabilities of a prompt: in the first chunk of the first choice, in the result, and in what
the next worker reads from the log.
"""

import re
from pathlib import Path

import pytest

from tests.publish.support import MODEL, Clock, FakeLog, admit, delivery_of, event, logprobs
from tests.support.tokenizers import byte_level
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import encode
from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import ScoredPrompt
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.input.served_model import MAX_PROMPT_LOGPROBS
from tokenmill_worker.jobs import AdmittedJob, FinishedJob
from tokenmill_worker.publish.publisher import Publisher

LENGTH = FinishReason.LENGTH
CONF = Path(__file__).parents[2] / "ops" / "deploy" / "redis" / "redis.conf"
SCORED = (TokenLogprob(-0.5, token_bytes=b"i"),)
PROMPT = ScoredPrompt(tuple(b"hi"), SCORED)


@pytest.mark.parametrize("stream", [True, False])
async def test_prompt_logprobs_are_in_the_first_chunk_and_the_result(stream: bool) -> None:
    log = FakeLog()
    publisher = Publisher(log)
    publisher.open(await admit(prompt_logprobs=0, stream=stream, max_tokens=40))
    await publisher.handle([event(prompt_logprobs=logprobs(-0.5))])
    assert not log.chunks, "an event without a token needs no chunk"
    for token in b"abc" * 13:
        await publisher.handle([event(bytes([token]))])
    [finished] = (await publisher.handle([event("z", end=LENGTH)])).finished
    first, *others = log.chunks["job"]
    assert first.prompt == finished.result.prompt == PROMPT
    assert all(chunk.prompt is None for chunk in others)
    assert finished.final_chunk.prompt is None


async def test_a_job_that_does_not_ask_has_no_prompt_logprobs() -> None:
    log = FakeLog()
    publisher = Publisher(log)
    publisher.open(await admit(max_tokens=2))
    [finished] = (await publisher.handle([event("ab", end=LENGTH)])).finished
    assert finished.result.prompt is None
    assert all(chunk.prompt is None for chunk in log.chunks["job"])


async def test_prompt_logprobs_are_sent_with_the_first_choice_even_if_another_is_faster() -> None:
    log = FakeLog()
    publisher = Publisher(log)
    publisher.open(await admit(prompt_logprobs=0, max_tokens=2, n=2))
    await publisher.handle([event("x", choice=1)])
    await publisher.handle([event(prompt_logprobs=logprobs(-0.5)), event("a")])
    await publisher.handle([event("b", end=LENGTH)])
    [finished] = (await publisher.handle([event("y", choice=1, end=LENGTH)])).finished
    assert [chunk.prompt for chunk in log.chunks["job"]] == [None, PROMPT, None, None]
    assert finished.result.prompt == PROMPT
    again = await resume(log, 2, n=2)
    assert isinstance(again, FinishedJob)
    assert again.result.prompt == PROMPT


async def resume(log: FakeLog, num_chunks: int, **params) -> AdmittedJob | FinishedJob:
    """Return what another worker makes of the job, after so many chunks if it has not ended."""
    chunks = tuple(log.chunks["job"][: None if params else num_chunks])
    request = JobRequest(
        job_id="job",
        prompt="hi",
        params=SamplingParams(**({"prompt_logprobs": 0, "max_tokens": 2} | params)),
    )
    delivery = delivery_of(request, chunks, token=2, attempt=2)
    return InputProcessor(byte_level(), MODEL, clock=Clock()).process(delivery)


async def test_a_resumed_job_reads_prompt_logprobs_from_the_log_or_computes_missing_ones() -> None:
    log = FakeLog()
    publisher = Publisher(log)
    publisher.open(await admit(prompt_logprobs=0, max_tokens=2))
    await publisher.handle([event(prompt_logprobs=logprobs(-0.5)), event("a")])
    continued, begun = await resume(log, 1), await resume(log, 0)
    assert isinstance(continued, AdmittedJob)
    assert isinstance(begun, AdmittedJob)
    assert continued.answer.prompt == PROMPT
    assert continued.generation.params.prompt_logprobs is None
    assert begun.answer.prompt is None
    assert begun.generation.params.prompt_logprobs == 0
    second = Publisher(FakeLog())
    second.open(continued)
    [finished] = (await second.handle([event("b", end=LENGTH, token=2)])).finished
    assert finished.result.prompt == PROMPT


async def test_too_many_prompt_logprobs_are_refused_with_their_number() -> None:
    request = JobRequest(
        job_id="job", prompt="h" * 3_000, params=SamplingParams(max_tokens=1, prompt_logprobs=100)
    )
    outcome = InputProcessor(byte_level(), MODEL, clock=Clock()).process(delivery_of(request))
    assert isinstance(outcome, FinishedJob)
    assert outcome.result.error is not None
    assert outcome.result.error.message == (
        "3000 prompt tokens with prompt_logprobs=100 have 303000 log-probabilities; the limit is "
        "131072"
    )


@pytest.mark.parametrize("tops", [0, 1, 31])
def test_the_most_prompt_logprobs_of_ordinary_tokens_fit_a_subscribers_buffer(tops: int) -> None:
    token, count = b" order", MAX_PROMPT_LOGPROBS // (1 + tops)
    entry = TokenLogprob(-0.5, ((100_000, -0.5),) * tops, token, (token,) * tops)
    prompt = ScoredPrompt((100_000,) * count, (entry,) * (count - 1), tuple(range(0, 6 * count, 6)))
    chunk = Chunk(job_id="job", index=0, token_ids=(1,), prompt=prompt)
    [limit] = re.findall(r"^client-output-buffer-limit pubsub \S+ (\d+)mb", CONF.read_text(), re.M)
    assert len(encode(chunk)) < int(limit) << 20


async def test_an_echo_is_in_the_first_chunk_of_each_choice_and_after_a_resume() -> None:
    log = FakeLog()
    publisher = Publisher(log)
    publisher.open(await admit(echo=True, logprobs=0, max_tokens=2, n=2))
    one = logprobs(-1.0)
    await publisher.handle(
        [
            event(prompt_logprobs=logprobs(-0.5)),
            event("a", logprobs=one),
            event("x", choice=1, logprobs=one),
        ]
    )
    chunks = log.chunks["job"]
    assert [(chunk.choice, chunk.text) for chunk in chunks] == [(0, "hia"), (1, "hix")]
    assert chunks[0].prompt == ScoredPrompt(tuple(b"hi"), SCORED, (1, 2))
    again = await resume(log, 2, n=2, echo=True, logprobs=0, prompt_logprobs=None)
    assert isinstance(again, AdmittedJob)
    second = Publisher(log)
    second.open(again)
    await second.handle([event("b", end=LENGTH, token=2, logprobs=one)])
    [finished] = (
        await second.handle([event("y", choice=1, end=LENGTH, token=2, logprobs=one)])
    ).finished
    assert [choice.text for choice in finished.result.choices] == ["hiab", "hixy"]
    assert [choice.text_ends for choice in finished.result.choices] == [(3, 4), (3, 4)]
    assert finished.result.prompt == chunks[0].prompt
    assert [chunk.text for chunk in log.chunks["job"][2:]] == ["b", "y"]


async def test_a_job_that_ended_in_the_queue_has_its_echoed_prompt() -> None:
    log = FakeLog()
    publisher = Publisher(log)
    publisher.open(await admit(echo=True, max_tokens=5))
    await publisher.handle([event("a")])
    request = JobRequest(job_id="job", prompt="hi", params=SamplingParams(echo=True, max_tokens=5))
    delivery = delivery_of(request, tuple(log.chunks["job"]), token=2, outcome="cancelled")
    ended = InputProcessor(byte_level(), MODEL, clock=Clock()).process(delivery)
    assert isinstance(ended, FinishedJob)
    assert ended.result.text == "hia"
