"""Events of engine steps in, chunks and results out; the log answers as the real one."""

import pytest

from tests.publish.support import CREATED_MS, EOS, Clock, FakeLog, admit, event, logprobs
from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_schemas.job import RetryPolicy
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.jobs import CancelOrder, RetryOrder
from tokenmill_worker.publish.publisher import Publisher, PublishLimits

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture
def log():
    return FakeLog()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def publisher(log, clock):
    return Publisher(log, worker_id="w1", model="tiny", clock=clock)


async def test_each_token_is_a_chunk_and_the_chunks_join_to_the_result(publisher, log, clock):
    publisher.open(await admit())
    assert (await publisher.handle([event("a", num_cached_tokens=1)])).finished == []
    clock.ms += 100
    await publisher.handle([event("é".encode()[:1])])
    await publisher.handle([event("é".encode()[1:])])
    [finished] = (await publisher.handle([event("", end=STOP)])).finished

    assert [(c.index, c.text, c.token_ids) for c in log.chunks["job"]] == [
        (0, "a", (97,)),
        (1, "", (0xC3,)),
        (2, "é", (0xA9,)),
        (3, "", (EOS,)),
    ]
    assert log.published == log.chunks["job"]
    assert [c.finish_reason for c in log.chunks["job"]] == [None, None, None, STOP]
    result = finished.result
    assert (result.status, result.text, result.finish_reason) == (JobStatus.SUCCEEDED, "aé", STOP)
    assert result.choices[0].text_ends == (1, 1, 2, 2)
    assert result.model == "tiny"
    usage = result.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (2, 1, 4)
    assert (usage.queue_ms, usage.ttft_ms, usage.total_ms) == (200, 500, 600)
    final = finished.final_chunk
    assert (final.index, final.token_ids, final.status, final.usage) == (
        4,
        (),
        JobStatus.SUCCEEDED,
        usage,
    )
    assert not publisher._running
    assert not publisher.has_pending


async def test_a_step_s_tokens_of_all_jobs_are_one_append_call(publisher, log):
    for job_id in ("a", "b", "c"):
        publisher.open(await admit(job_id))
    await publisher.handle(
        [event("xyz", "a"), event("u", "b"), event("vw", "c"), event("!", "stranger")]
    )
    assert len(log.calls) == 1
    assert [(i.chunk.job_id, i.chunk.index, i.chunk.text) for i in log.calls[0]] == [
        ("a", 0, "x"), ("a", 1, "y"), ("a", 2, "z"), ("b", 0, "u"), ("c", 0, "v"), ("c", 1, "w"),
    ]  # fmt: skip
    assert (await publisher.handle([])).finished == []
    assert len(log.calls) == 1


async def test_a_stop_string_ends_the_choice_and_orders_the_engine_to_stop_it(publisher, log):
    publisher.open(await admit(stop=("\n\n",)))
    await publisher.handle([event("ab\n")])
    report = await publisher.handle([event("\nccc")])  # accepted drafts behind the stop string
    assert report.cancel == [CancelOrder("job/1", STOP, 0)]
    [finished] = report.finished
    assert (finished.result.text, finished.result.status) == ("ab", JobStatus.SUCCEEDED)
    assert finished.result.token_ids == tuple(b"ab\n\n") == log.token_ids("job")
    assert finished.result.usage.completion_tokens == 4
    assert log.chunks["job"][-1].finish_reason is STOP
    late = await publisher.handle([event("d"), event("", end=FinishReason.CANCELLED)])
    assert (late.finished, late.cancel, len(log.calls)) == ([], [], 2)


async def test_a_stop_string_in_the_last_token_cancels_nothing_in_the_engine(publisher):
    publisher.open(await admit(stop=("b",)))
    report = await publisher.handle([event("ab", end=LENGTH)])
    assert report.cancel == []
    assert report.finished[0].result.finish_reason is STOP
    assert report.finished[0].result.text == "a"


async def test_text_held_back_is_sent_with_the_last_token(publisher, log):
    publisher.open(await admit(stop=("##!",)))
    await publisher.handle([event("x#")])
    [finished] = (await publisher.handle([event("#", end=LENGTH)])).finished
    assert finished.result.text == "x##" == log.text("job")
    assert finished.final_chunk.text == ""


async def test_a_broken_off_answer_keeps_its_text_and_the_final_chunk_has_the_rest(publisher, log):
    publisher.open(await admit(stop=("##!",)))
    await publisher.handle([event("x#")])
    for reason, status in (
        (FinishReason.CANCELLED, JobStatus.CANCELLED),
        (FinishReason.EXPIRED, JobStatus.EXPIRED),
    ):
        publisher.open(await admit(reason.value, stop=("##!",)))
        await publisher.handle([event("x#", reason.value)])
        [finished] = (await publisher.handle([event("", reason.value, end=reason)])).finished
        assert (finished.result.status, finished.result.text) == (status, "x#")
        assert log.text(reason.value) + finished.final_chunk.text == "x#"
        assert finished.final_chunk.index == 2


async def test_each_choice_counts_its_own_tokens_and_ends_separately(publisher, log):
    publisher.open(await admit(n=3, stop=("!",)))
    await publisher.handle([event("a", choice=0), event("bb", choice=1), event("c", choice=2)])
    report = await publisher.handle([event("!zz", choice=1), event("d", choice=0, end=LENGTH)])
    assert report.cancel == [CancelOrder("job/1", STOP, 1)]
    assert report.finished == []
    report = await publisher.handle(
        [event("zz", choice=1), event("", choice=2, end=FinishReason.EXPIRED)]
    )
    [finished] = report.finished
    chunks = log.chunks["job"]
    assert [(c.index, c.choice, c.text) for c in chunks] == [
        (0, 0, "a"), (0, 1, "b"), (1, 1, "b"), (0, 2, "c"), (1, 0, "d"), (2, 1, ""), (1, 2, ""),
    ]  # fmt: skip
    assert {c.n for c in chunks} == {3}
    assert [c.finish_reason for c in chunks][4:] == [LENGTH, STOP, FinishReason.EXPIRED]
    assert [(c.text, c.finish_reason) for c in finished.result.choices] == [
        ("ad", LENGTH), ("bb", STOP), ("c", FinishReason.EXPIRED),
    ]  # fmt: skip
    assert finished.result.status is JobStatus.EXPIRED
    assert finished.result.usage.completion_tokens == 6
    assert (finished.final_chunk.index, finished.final_chunk.n) == (2, 3)


async def test_a_cancelled_choice_ends_with_a_chunk_of_its_held_back_text(publisher, log):
    publisher.open(await admit(n=2, stop=("##",)))
    await publisher.handle([event("x#", choice=0), event("y", choice=1)])
    ends = [event("", choice=c, end=FinishReason.CANCELLED) for c in (0, 1)]
    [finished] = (await publisher.handle(ends)).finished
    assert (
        [log.text("job", c) for c in (0, 1)]
        == ["x#", "y"]
        == [c.text for c in finished.result.choices]
    )
    assert finished.final_chunk.text == ""


async def test_logprobs_are_published_only_for_jobs_that_ask_for_them(publisher, log):
    publisher.open(await admit("with", logprobs=True, stop=("c",)))
    publisher.open(await admit("without"))
    both = [
        event("abcd", job, logprobs=logprobs(-1.0, -2.0, -3.0, -4.0)) for job in ("with", "without")
    ]
    [finished] = (await publisher.handle(both)).finished
    named = tuple(
        TokenLogprob(value, token_bytes=token)
        for value, token in ((-1.0, b"a"), (-2.0, b"b"), (-3.0, b"c"))
    )
    assert [c.logprobs for c in log.chunks["with"]] == [(one,) for one in named]
    assert finished.result.logprobs == named
    assert {c.logprobs for c in log.chunks["without"]} == {None}


ONCE = RetryPolicy(max_attempts=1)


async def test_a_transient_error_is_retried_by_the_job_s_policy(publisher, log):
    job = await admit(retry=RetryPolicy(max_attempts=2, backoff_ms=70))
    publisher.open(job)
    await publisher.handle([event("ab")])
    report = await publisher.handle(
        [event("", end=FinishReason.ERROR, error="boom", error_code="engine_error")]
    )
    assert report.retry == [RetryOrder(job.delivery, 70, "boom")]
    assert report.finished == []
    assert "job/1" not in publisher._running
    # the log stays open for the next attempt
    assert [c.finish_reason for c in log.chunks["job"]] == [None, None]


async def test_an_error_fails_the_job_with_its_code_and_keeps_the_text(publisher, log):
    publisher.open(await admit(retry=ONCE))
    await publisher.handle([event("ab")])
    broken = event(
        "",
        end=FinishReason.ERROR,
        error="the model failed on this request: boom",
        error_code="engine_error",
    )
    [finished] = (await publisher.handle([broken])).finished
    assert (finished.result.status, finished.result.text) == (JobStatus.FAILED, "ab")
    assert (finished.result.error.code, finished.result.error.message) == (
        "engine_error",
        "the model failed on this request: boom",
    )
    assert finished.final_chunk.error == finished.result.error
    assert finished.result.usage.completion_tokens == 2


async def test_an_error_of_one_choice_stops_the_others(publisher):
    publisher.open(await admit(n=2, retry=ONCE))
    await publisher.handle([event("a", choice=0), event("b", choice=1)])
    report = await publisher.handle([event("", choice=1, end=FinishReason.ERROR, error="boom")])
    assert report.cancel == [CancelOrder("job/1", FinishReason.ERROR, None)]
    assert [c.text for c in report.finished[0].result.choices] == ["a", "b"]


async def test_an_engine_error_after_a_stop_string_does_not_fail_the_job(publisher):
    publisher.open(await admit(n=2, stop=("!",)))
    await publisher.handle([event("a!", choice=0), event("b", choice=1)])
    assert (
        await publisher.handle([event("", choice=0, end=FinishReason.ERROR, error="boom")])
    ).finished == []
    [finished] = (await publisher.handle([event("c", choice=1, end=LENGTH)])).finished
    assert finished.result.status is JobStatus.SUCCEEDED


async def test_a_request_refused_by_the_engine_bills_no_tokens(publisher):
    publisher.open(await admit(n=2))
    refusal = event(
        "", end=FinishReason.ERROR, error="it can never fit", error_code="invalid_request"
    )
    [finished] = (await publisher.handle([refusal])).finished
    assert finished.result.status is JobStatus.FAILED
    assert (finished.result.usage.prompt_tokens, finished.result.usage.completion_tokens) == (0, 0)


async def test_jobs_without_streaming_append_checkpoints(log, clock):
    publisher = Publisher(log, limits=PublishLimits(checkpoint_tokens=4), clock=clock)
    publisher.open(await admit(stream=False))
    for letter in "abcdefghi":
        await publisher.handle([event(letter)])
    assert [(c.index, c.text) for c in log.chunks["job"]] == [(0, "abcd"), (4, "efgh")]
    [finished] = (await publisher.handle([event("j", end=LENGTH)])).finished
    assert len(log.calls) == 2  # the result has the rest
    assert finished.result.text == "abcdefghij"
    assert log.published == []


async def test_a_checkpoint_of_several_choices_holds_a_run_of_each(log, clock):
    publisher = Publisher(log, limits=PublishLimits(checkpoint_tokens=6), clock=clock)
    publisher.open(await admit(stream=False, n=2))
    for _ in range(3):
        await publisher.handle([event("a", choice=0), event("b", choice=1)])
    assert [(c.index, c.choice, c.text) for c in log.chunks["job"]] == [
        (0, 0, "aaa"),
        (0, 1, "bbb"),
    ]


async def test_the_first_chunk_has_the_usage_measured_at_the_first_token(publisher, log):
    publisher.open(await admit())
    await publisher.handle([event("ab", num_cached_tokens=99)])
    first, second = log.chunks["job"]
    assert (first.usage.prompt_tokens, first.usage.cached_tokens) == (2, 2)
    assert (first.usage.queue_ms, first.usage.ttft_ms) == (200, 500)
    assert second.usage is None
    assert CREATED_MS + first.usage.ttft_ms == Clock().ms


async def test_a_resumed_job_continues_at_the_end_of_its_log(publisher, log):
    undisturbed = await admit(n=2, stop=("cd",))
    publisher.open(undisturbed)
    await publisher.handle([event("ab", choice=0, num_cached_tokens=1), event("x", choice=1)])
    before = tuple(log.chunks["job"])

    publisher.close("job/1")
    resumed = await admit(n=2, stop=("cd",), log=before)
    assert resumed.generation.resumed == (tuple(b"ab"), tuple(b"x"))
    publisher.open(resumed)
    assert not publisher.has_pending
    report = await publisher.handle([event("cd", choice=0), event("y", choice=1, end=LENGTH)])
    assert [(c.index, c.choice, c.text) for c in log.chunks["job"]][3:] == [
        (2, 0, ""),
        (3, 0, ""),
        (1, 1, "y"),
    ]
    [finished] = report.finished
    assert [c.text for c in finished.result.choices] == ["ab", "xy"]
    assert (finished.result.usage.ttft_ms, finished.result.usage.cached_tokens) == (500, 1)
    assert finished.result.usage.completion_tokens == 6
