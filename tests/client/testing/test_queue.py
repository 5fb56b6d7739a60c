"""The in-memory queue for users' tests: real clients, and the faults that a test can cause."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.worker import QUEUE, client_of, database_url, running_worker
from tokenmill import (
    AsyncClient,
    Client,
    InvalidRequest,
    JobFailed,
    RateLimited,
    ResultTimeout,
)
from tokenmill.testing import Answer, InMemoryQueue, failure
from tokenmill_schemas import Chunk, FinishReason, JobRequest, JobStatus
from tokenmill_schemas.generation import ResponseFormat
from tokenmill_schemas.result import JobError, JobResult

WAIT_S = 30.0


@pytest.fixture
def queue() -> Iterator[InMemoryQueue]:
    with InMemoryQueue() as opened:
        yield opened


@pytest.fixture
def client(queue: InMemoryQueue) -> Client:
    return queue.client()


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def wait_for_tokens(client: Client, job: str, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while client.status(job).tokens < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_scripted_answer_streams_and_ends(queue: InMemoryQueue, client: Client) -> None:
    queue.answer("The sky is blue.\n", Answer("second", pause_s=0.01))
    job = client.submit(prompt="Why is it blue?", metadata={"a": "b"}, tenant="acme")
    chunks = list(client.stream(job, timeout=WAIT_S))
    result = client.result(job, timeout=WAIT_S)
    assert [chunk.text for chunk in chunks] == ["The", " sky", " is", " blue.", "\n", ""]
    assert [chunk.index for chunk in chunks] == [0, 1, 2, 3, 4, 5]
    assert (result.text, result.status, result.finish_reason) == (
        "The sky is blue.\n",
        "succeeded",
        FinishReason.STOP,
    )
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (4, 5)
    assert (result.metadata, result.tenant) == ({"a": "b"}, "acme")
    assert text_of(list(client.stream(job, starting_after=2))) == " is blue.\n"
    assert client.result(client.submit(prompt="?"), timeout=WAIT_S).text == "second"
    assert client.result(client.submit(prompt="?"), timeout=WAIT_S).text == "ok"
    assert [request.prompt for request in queue.requests] == ["Why is it blue?", "?", "?"]
    assert client.depth().running == 0


def test_a_scheduled_job_is_answered_once_it_is_due(client: Client) -> None:
    job = client.submit(prompt="later", not_before=time.time() + 0.2)
    assert client.status(job).status is JobStatus.SCHEDULED
    assert client.result(job, timeout=WAIT_S).text == "ok"
    assert client.depth().num_queued == 0


def test_a_scripted_answer_may_have_thoughts_and_tool_calls(
    queue: InMemoryQueue, client: Client
) -> None:
    answer = Answer(
        "I look.",
        reasoning="Where is Bern?",
        tool_calls=(("weather", {"city": "Bern"}), ("clock", {})),
    )
    queue.answer(answer, answer)
    job = client.submit(prompt="Rain?")
    chunks = list(client.stream(job, timeout=WAIT_S))
    result = client.result(job, timeout=WAIT_S)
    assert "".join(chunk.reasoning for chunk in chunks) == result.reasoning == "Where is Bern?"
    assert text_of(chunks) == result.text == "I look."
    assert [(c.name, c.arguments, c.is_complete) for c in result.tool_calls] == [
        ("weather", '{"city": "Bern"}', True),
        ("clock", "{}", True),
    ]
    for index, call in enumerate(result.tool_calls):
        deltas = [d for chunk in chunks for d in chunk.tool_calls if d.index == index]
        assert "".join(delta.arguments for delta in deltas) == call.arguments
        assert [(delta.id, delta.name) for delta in deltas if delta.name] == [(call.id, call.name)]
    assert result.finish_reason is FinishReason.TOOL_CALLS
    assert (result.usage.reasoning_tokens, result.usage.completion_tokens) == (3, 10)
    for after in range(10):
        rest = list(client.stream(job, starting_after=after))
        assert text_of(rest) == text_of(chunks[after:])
        assert [c.reasoning for c in rest if c.reasoning] == [
            c.reasoning for c in chunks[after:] if c.reasoning
        ]

    cut = client.result(client.submit(prompt="Rain?", max_tokens=7), timeout=WAIT_S)
    assert (cut.finish_reason, cut.usage.completion_tokens) == (FinishReason.LENGTH, 7)
    assert [(c.name, c.arguments, c.is_complete) for c in cut.tool_calls] == [
        ("weather", '{"city":', False)
    ]


def test_a_function_may_answer_and_max_tokens_cuts_its_text() -> None:
    def echo(request: JobRequest) -> str:
        return f"you said {request.prompt}"

    with InMemoryQueue("echoes", default=echo) as queue:
        client = queue.client()
        jobs = client.submit_many(
            [{"prompt": "one"}, {"prompt": "two", "max_tokens": 2}, {"prompt": "3", "n": 2}]
        )
        one, two, three = [client.result(job, timeout=WAIT_S) for job in jobs]
    assert one.text == "you said one"
    assert (two.text, two.finish_reason) == ("you said", FinishReason.LENGTH)
    assert [choice.text for choice in three.choices] == ["you said 3", "you said 3"]


def test_a_scripted_failure_keeps_the_partial_text(queue: InMemoryQueue, client: Client) -> None:
    queue.answer(failure("engine_error", "the device is gone", after="I was", retryable=True))
    job = client.submit(prompt="?")
    with pytest.raises(JobFailed, match="the device is gone") as caught:
        client.result(job, timeout=WAIT_S, check=True)
    assert caught.value.result.text == "I was"
    assert caught.value.result.error is not None
    assert caught.value.result.error.retryable


def test_a_held_answer_stops_after_its_first_tokens(queue: InMemoryQueue, client: Client) -> None:
    queue.answer(Answer("one two three", hold_after=2))
    with queue.held():
        job = client.submit(prompt="?")
        assert client.status(job).status is JobStatus.QUEUED  # nothing begins while it is held
        with pytest.raises(ResultTimeout):
            client.result(job, timeout=0.1)
    wait_for_tokens(client, job, 3)
    queue.answer(Answer("one two three", hold_after=2))
    job = client.submit(prompt="again")
    wait_for_tokens(client, job, 1)
    assert client.result(job, timeout=WAIT_S).text == "one two three"


def test_cancel_works_on_running_waiting_and_ended_jobs(
    queue: InMemoryQueue, client: Client
) -> None:
    queue.answer(Answer("word " * 10_000, pause_s=0.01))
    running = client.submit(prompt="?")
    wait_for_tokens(client, running, 2)
    queue.hold()
    waiting = client.submit(prompt="?")
    assert client.cancel(waiting) == "cancelled"
    assert client.cancel(running) == "cancelling"
    ended = client.result(running, timeout=WAIT_S)
    assert (ended.status, ended.finish_reason) == (JobStatus.CANCELLED, FinishReason.CANCELLED)
    assert ended.text.startswith("word word")
    assert [chunk.status for chunk in client.stream(waiting, timeout=WAIT_S)] == [
        JobStatus.CANCELLED
    ]
    assert client.cancel(running) == "cancelled"


def test_deadlines_idempotency_keys_and_limits_work_as_on_a_real_queue(
    queue: InMemoryQueue, client: Client
) -> None:
    queue.answer(Answer("word " * 10_000, pause_s=0.01))
    late = client.submit(prompt="?", deadline=0.3)
    first = client.submit(prompt="a", idempotency_key="k")
    again = client.submit(prompt="a", idempotency_key="k")
    assert (again, again.is_new) == (first, False)
    client.set_limits(rate=0.001, burst=1)
    client.submit(prompt="?", tenant="t")
    with pytest.raises(RateLimited):
        client.submit(prompt="?", tenant="t")
    assert client.result(late, timeout=WAIT_S).status is JobStatus.EXPIRED


async def test_the_asynchronous_client_streams_side_by_side(queue: InMemoryQueue) -> None:
    queue.answer(*(Answer(f"answer number {n}", pause_s=0.02) for n in range(5)))
    async with queue.async_client() as client:

        async def ask() -> str:
            job = await client.submit(prompt="?")
            return "".join([chunk.text async for chunk in client.stream(job, timeout=WAIT_S)])

        answers = await asyncio.gather(*(ask() for _ in range(5)))
    assert sorted(answers) == [f"answer number {n}" for n in range(5)]


def test_an_error_in_an_answer_function_is_raised() -> None:
    def broken(request: JobRequest) -> str:
        raise ZeroDivisionError(request.prompt)

    def use() -> None:
        with InMemoryQueue(default=broken) as queue:
            client = queue.client()
            with pytest.raises(ResultTimeout):
                client.result(client.submit(prompt="x"), timeout=0.3)

    with pytest.raises(ExceptionGroup) as caught:
        use()
    assert caught.group_contains(ZeroDivisionError)


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
}


def test_an_answer_that_breaks_its_schema_fails_as_on_a_worker() -> None:
    pytest.importorskip("jsonschema_rs")
    good, bad = '{"name": "Ulm", "people": 126000}', '{"name": "Ulm", "people": "many"}'
    with InMemoryQueue() as queue:
        client = queue.client()
        queue.answer(good, bad, bad, "Ulm", bad)

        def end(strict: bool = True, **sampling: Any) -> JobResult:
            wanted = ResponseFormat(json_schema=CITY, strict=strict)
            job = client.submit(prompt="A city", response_format=wanted, **sampling)
            return client.result(job, timeout=WAIT_S)

        assert end().error is None
        broken = end()
        assert broken.status is JobStatus.FAILED
        assert broken.text == bad
        assert broken.error == JobError(
            "schema_violation",
            'the answer breaks its JSON schema: "many" is not of type "integer" (at /people)',
        )
        lenient = end(strict=False)
        assert lenient.status is JobStatus.SUCCEEDED
        assert lenient.error is not None
        assert lenient.error.code == "schema_violation"
        assert "it is not JSON" in str(end().error)
        assert end(max_tokens=1).error is None  # an answer that was cut off is not checked


def test_a_schema_that_cannot_be_used_is_refused() -> None:
    pytest.importorskip("jsonschema_rs")
    with InMemoryQueue(default="{}") as queue:
        client = queue.client()
        wanted = ResponseFormat(json_schema={"type": "no such type"})
        result = client.result(client.submit(prompt="x", response_format=wanted), timeout=WAIT_S)
    assert (result.status, result.text) == (JobStatus.FAILED, "")
    assert result.error is not None
    assert result.error.code == "invalid_request"


@pytest.mark.redis
async def test_the_real_worker_gives_the_same_result(redis_url: str, tmp_path: Path) -> None:
    """Chunks and results have the same shape, field by field, as those of a real worker on a real
    server.
    """
    database, num_tokens = database_url(tmp_path), 5
    asked: dict[str, Any] = {"prompt": "Hello there", "max_tokens": num_tokens, "ignore_eos": True}
    asked |= {"tenant": "t", "metadata": {"a": "b"}}

    async def ask(client: AsyncClient) -> tuple[list[Chunk], object]:
        job = await client.submit(None, **asked)
        chunks = [chunk async for chunk in client.stream(job, timeout=WAIT_S)]
        return chunks, await client.result(job, timeout=WAIT_S)

    async with (
        running_worker(redis_url, database, model="synthetic?step_ms=50"),
        client_of(redis_url) as real,
    ):
        for _ in range(5):  # steps that pile up, on a machine that is busy, share a chunk
            chunks, result = await ask(real)
            if len(chunks) == num_tokens + 1:
                break
    # else the stream starts after the end, and comes from the result
    unhurried = Answer("a b c d e f", pause_s=0.05)
    with InMemoryQueue(QUEUE, default=unhurried) as queue:
        async with queue.async_client() as client:
            ours, our_result = await ask(client)
    assert [shape_of(chunk) for chunk in ours] == [shape_of(chunk) for chunk in chunks]
    assert shape_of(our_result) == shape_of(result)


def shape_of(value: object) -> list[str]:
    """Return the fields that are set, without those that depend on the words or the time."""
    return sorted(set(msgspec.to_builtins(value)) - {"usage", "started_ms", "text"})


async def test_continuations_have_the_scripted_scores(queue: InMemoryQueue, client: Client) -> None:
    queue.answer(Answer("", total_logprobs=(-1.5, -0.5)))
    result = await asyncio.to_thread(
        client.score, [" Paris", " a big town", " x"], prompt="It is", timeout=WAIT_S
    )
    assert [choice.text for choice in result.choices] == [" Paris", " a big town", " x"]
    assert [choice.total_logprob for choice in result.choices] == pytest.approx([-1.5, -0.5, -1])
    assert [len(choice.logprobs or ()) for choice in result.choices] == [1, 3, 1]
    assert queue.requests[0].continuations == (" Paris", " a big town", " x")
    async with queue.async_client() as other:
        scored = await other.score([(5, 6)], prompt_ids=[1, 2], timeout=WAIT_S)
        assert scored.choices[0].total_logprob == -2.0
        with pytest.raises(InvalidRequest, match="continuations is empty; there is nothing to"):
            await other.score([], prompt="x")
        with pytest.raises(InvalidRequest, match="stop cannot be given with continuations"):
            await other.score(["a"], prompt="x", stop="b")
        queue.answer(failure("engine_error", "the device is gone"))
        with pytest.raises(JobFailed):
            await other.score(["a"], prompt="x", timeout=WAIT_S)
    job = client.submit(prompt="It is", continuations=["a b", "c"])
    for _ in range(2):  # while the job runs, if the stream is quick; then from its result
        chunks = list(client.stream(job, timeout=WAIT_S))
        tokens = [(chunk.choice, chunk.text) for chunk in chunks if chunk.token_ids]
        assert tokens == [(0, "a"), (0, " b"), (1, "c")]
        # a choice ends with its last token, or after it if the chunks come from the result
        ends = [chunk.choice for chunk in chunks if chunk.finish_reason and not chunk.is_last]
        assert ends == [0, 1]
        assert text_of(chunks) == "a bc"


def test_a_prompt_is_scored_and_echoed(queue: InMemoryQueue, client: Client) -> None:
    queue.answer("blue now")
    job = client.submit(prompt="The sky is ", prompt_logprobs=0, echo=True)
    chunks = list(client.stream(job, timeout=WAIT_S))
    result = client.result(job, timeout=WAIT_S)
    assert result.text == text_of(chunks) == "The sky is blue now"
    assert result.prompt == chunks[0].prompt
    assert result.prompt is not None
    assert len(result.prompt.logprobs) == len(result.prompt.token_ids) - 1
