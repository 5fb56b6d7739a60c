"""Jobs that come back continue from their log as if undisturbed, or had already ended in it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.publish.support import (
    CREATED_MS,
    EOS,
    MODEL,
    Clock,
    FakeLog,
    admit,
    delivery_of,
    event,
)
from tests.support.tokenizers import byte_level
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import encode
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobStatus, Usage
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import AdmittedJob, FinishedJob
from tokenmill_worker.publish.publisher import Publisher, PublishLimits

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def processor():
    return InputProcessor(byte_level(), MODEL, worker_id="w2", clock=Clock())


def tokens(text: str, index: int = 0, choice: int = 0, end: FinishReason | None = None) -> Chunk:
    return Chunk(
        job_id="job",
        index=index,
        token_ids=tuple(text.encode()),
        text=text,
        choice=choice,
        finish_reason=end,
    )


async def resume(
    *log: Chunk, deadline_ms: int | None = None, delivery_outcome: str = "run", **params
):
    request = JobRequest(
        job_id="job", prompt="hi", params=SamplingParams(**params), deadline_ms=deadline_ms
    )
    return processor().process(
        delivery_of(request, log, outcome=delivery_outcome, attempt=2, token=2)
    )


async def test_a_job_continues_after_the_tokens_of_its_log():
    admitted = await resume(tokens("a"), tokens("b", 1), max_tokens=5)
    assert isinstance(admitted, AdmittedJob)
    assert admitted.generation.resumed == (tuple(b"ab"),)
    assert admitted.generation.done == ()
    assert admitted.generation.params.max_tokens == 5
    assert admitted.answer.num_tokens == 2
    assert admitted.answer.choices[0].stream.text == "ab"


async def test_choices_that_ended_are_not_run_again():
    log = (tokens("a"), tokens("x", 0, 1), tokens("b", 1, 0, LENGTH))
    admitted = await resume(*log, n=3, max_tokens=2)
    assert isinstance(admitted, AdmittedJob)
    assert admitted.generation.resumed == (tuple(b"ab"), tuple(b"x"), ())
    assert admitted.generation.done == (0,)


@pytest.mark.parametrize(
    ("log", "params", "reason", "text"),
    [
        ((tokens("abc", end=LENGTH),), {"max_tokens": 3}, LENGTH, "abc"),
        ((tokens("abc"),), {"max_tokens": 3}, LENGTH, "abc"),
        ((tokens("ab"), tokens("##", 2)), {"stop": ("##",)}, STOP, "ab"),
        ((Chunk(job_id="job", index=0, token_ids=(97, EOS), text="a"),), {}, STOP, "a"),
        ((tokens("ab"),), {"stop_token_ids": (98,)}, STOP, "ab"),
        ((tokens("a", end=STOP), tokens("b", 0, 1, LENGTH)), {"n": 2}, STOP, "a"),
    ],
)
async def test_a_log_that_contains_the_end_finishes_the_job(log, params, reason, text):
    outcome = await resume(*log, **params)
    assert isinstance(outcome, FinishedJob)
    result = outcome.result
    assert (result.status, result.finish_reason, result.text) == (JobStatus.SUCCEEDED, reason, text)
    assert result.usage.prompt_tokens == 2
    assert result.usage.completion_tokens == sum(len(c.token_ids) for c in log)
    assert (result.attempt, result.worker_id, outcome.token) == (2, "w2", 2)
    assert outcome.final_chunk.index == len(result.token_ids)


async def test_the_final_chunk_does_not_repeat_text_of_the_last_logged_chunk():
    """The end's chunk had what was held back until then; the final chunk must not tell it again."""
    outcome = await resume(tokens("a"), tokens("#", 1, end=LENGTH), stop=("##",), max_tokens=2)
    assert isinstance(outcome, FinishedJob)
    assert outcome.result.choices[0].text_ends == (1, 2)
    assert outcome.final_chunk.text == ""


@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": True},
        {"min_tokens": 3},
        {"max_tokens": 3},
        {"stop": ("b!",)},
        {"stop_token_ids": (99,)},
    ],
)
async def test_a_log_without_an_end_continues_the_job(params):
    log = Chunk(
        job_id="job", index=0, token_ids=(97, EOS if "stop" not in str(params) else 98), text="a"
    )
    if params == {"max_tokens": 3}:
        log = tokens("ab")
    assert isinstance(await resume(log, **params), AdmittedJob)


@pytest.mark.parametrize(
    ("delivery_outcome", "status", "reason", "code"),
    [
        ("cancelled", JobStatus.CANCELLED, FinishReason.CANCELLED, None),
        ("expired", JobStatus.EXPIRED, FinishReason.EXPIRED, "deadline_exceeded"),
        ("dead", JobStatus.DEAD, FinishReason.ERROR, "dead"),
    ],
)
async def test_a_job_that_ended_in_the_queue_is_recorded_with_its_delivered_text(
    delivery_outcome, status, reason, code
):
    first = Chunk(
        job_id="job",
        index=0,
        token_ids=(97, 35),
        text="a",
        usage=Usage(prompt_tokens=2, cached_tokens=1, ttft_ms=300),
    )
    outcome = await resume(first, stop=("##",), delivery_outcome=delivery_outcome)
    assert isinstance(outcome, FinishedJob)
    result = outcome.result
    assert (result.status, result.text, result.finish_reason) == (status, "a#", reason)
    assert (result.error.code if result.error else None) == code
    assert (
        result.usage.prompt_tokens,
        result.usage.cached_tokens,
        result.usage.completion_tokens,
    ) == (2, 1, 2)
    assert result.usage.ttft_ms == 300
    assert outcome.final_chunk.text == "#"
    untouched = await resume(delivery_outcome=delivery_outcome)
    assert (untouched.result.status, untouched.result.choices) == (status, ())
    assert untouched.result.usage.prompt_tokens == 0


@pytest.mark.parametrize(
    ("delivery_outcome", "status"),
    [
        ("run", JobStatus.SUCCEEDED),
        ("dead", JobStatus.SUCCEEDED),
        ("cancelled", JobStatus.CANCELLED),
    ],
)
async def test_a_complete_answer_in_the_log_is_recorded_despite_another_outcome(
    delivery_outcome, status
):
    """Its workers died before they could record it: it needs no engine and can harm none."""
    outcome = await resume(
        tokens("ab"), tokens("c", 2), max_tokens=3, delivery_outcome=delivery_outcome
    )
    assert isinstance(outcome, FinishedJob)
    result = outcome.result
    assert (result.status, result.text, result.finish_reason, result.error) == (
        status,
        "abc",
        LENGTH,
        None,
    )
    incomplete = await resume(tokens("ab"), max_tokens=3, delivery_outcome="dead")
    assert incomplete.result.status is JobStatus.DEAD


async def test_text_held_back_by_several_choices_is_in_the_result():
    """The last chunk cannot hold it; a reader without the end of a choice reads the result."""
    outcome = await resume(
        tokens("a#"), tokens("b", 0, 1), n=2, stop=("##",), delivery_outcome="cancelled"
    )
    assert isinstance(outcome, FinishedJob)
    assert [c.text for c in outcome.result.choices] == ["a#", "b"]
    assert outcome.result.choices[0].token_ids == tuple(b"a#")
    assert (outcome.final_chunk.text, outcome.final_chunk.n) == ("", 2)


@pytest.mark.parametrize(
    "payload", [b"\xc1", encode(JobRequest(job_id="job", params=SamplingParams(n=10**9)))]
)
async def test_a_bad_request_that_ended_in_the_queue_keeps_its_outcome(payload):
    delivery = delivery_of(JobRequest(job_id="job"), (tokens("a"),), outcome="cancelled")
    outcome = processor().process(
        type(delivery)(
            **{f: getattr(delivery, f) for f in delivery.__slots__} | {"payload": payload}
        )
    )
    assert isinstance(outcome, FinishedJob)
    assert outcome.result.status is JobStatus.CANCELLED


async def test_a_deadline_that_passed_during_the_answer_keeps_the_text():
    outcome = await resume(tokens("ab"), deadline_ms=CREATED_MS + 100)
    assert isinstance(outcome, FinishedJob)
    assert (outcome.result.status, outcome.result.text) == (JobStatus.EXPIRED, "ab")
    assert outcome.result.usage.prompt_tokens == 2


@pytest.mark.parametrize(
    "log",
    [
        (b"\xc1",),
        (encode(tokens("a")), b"noise"),
        (encode(tokens("a")), encode(tokens("c", 2))),
        (encode(tokens("ab")), encode(tokens("b", 1))),
        (encode(tokens("a", choice=5)),),
        (encode(tokens("a", end=STOP)), encode(tokens("b", 1))),
    ],
)
async def test_a_log_that_cannot_be_continued_fails_the_job(log):
    delivery = delivery_of(JobRequest(job_id="job", prompt="hi"))
    broken = type(delivery)(**{f: getattr(delivery, f) for f in delivery.__slots__} | {"log": log})
    outcome = processor().process(broken)
    assert isinstance(outcome, FinishedJob)
    assert outcome.result.error is not None
    assert (outcome.result.status, outcome.result.error.code) == (JobStatus.FAILED, "corrupt_log")


STEPS = st.lists(st.lists(st.text("ab#é", max_size=3), min_size=2, max_size=2), max_size=8)


@given(steps=STEPS, stop=st.sampled_from([(), ("##",), ("a#", "é")]), stream=st.booleans())
@settings(max_examples=60, deadline=None)
async def test_a_job_handed_over_after_any_step_has_the_undisturbed_result(steps, stop, stream):
    """Two choices. The test plays the engine: it generates again what the log does not hold."""
    undisturbed, _ = await run(steps, stop, stream, hand_over_at=None)
    for cut in range(len(steps) + 1):
        result, log = await run(steps, stop, stream, hand_over_at=cut)
        assert [(c.text, c.token_ids, c.text_ends, c.finish_reason) for c in result.choices] == [
            (c.text, c.token_ids, c.text_ends, c.finish_reason) for c in undisturbed.choices
        ]
        assert result.usage == undisturbed.usage
        if stream:
            for choice in result.choices:
                assert log.text("job", choice.index) == choice.text
                assert log.token_ids("job", choice.index) == choice.token_ids


async def run(steps, stop, stream, hand_over_at):
    log = FakeLog()
    params = {"n": 2, "stop": stop, "stream": stream}
    whole = ["".join(step[choice] for step in steps).encode() for choice in (0, 1)]
    publisher = Publisher(log, limits=PublishLimits(checkpoint_tokens=3), clock=Clock())
    publisher.open(await admit(**params))
    given_out = [0, 0]
    finished: list[FinishedJob] = []
    for number, step in enumerate([*steps, None]):
        if number == hand_over_at and not finished:
            request = JobRequest(
                job_id="job", prompt="hi", stream=stream, params=SamplingParams(n=2, stop=stop)
            )
            again = processor().process(delivery_of(request, tuple(log.chunks.get("job", ()))))
            if isinstance(again, FinishedJob):
                return again.result, log
            publisher = Publisher(log, limits=PublishLimits(checkpoint_tokens=3), clock=Clock())
            publisher.open(again)
            given_out = [len(again.answer.choices[c].stream.token_ids) for c in (0, 1)]
        events = []
        for choice in (0, 1):
            upto = sum(len(s[choice].encode()) for s in steps[: number + 1])
            part = whole[choice][given_out[choice] : upto]
            given_out[choice] = max(upto, given_out[choice])
            events.append(event(part, choice=choice, end=STOP if step is None else None))
        finished += (await publisher.handle(events)).finished
    [only] = finished
    return only.result, log
