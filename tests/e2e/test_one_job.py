"""One job from submit to row: claimed, generated, streamed, recorded, acknowledged."""

import asyncio

import pytest
import sqlalchemy
from redis.asyncio import Redis

from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobStatus

pytestmark = pytest.mark.redis


@pytest.fixture
def database(tmp_path):
    return database_url(tmp_path)


def rows(database, query):
    engine = sqlalchemy.create_engine(database)
    with engine.connect() as connection:
        found = connection.execute(sqlalchemy.text(query)).fetchall()
    engine.dispose()
    return found


async def collect(client, job, **options):
    return [chunk async for chunk in client.stream(job, **options)]


def tokens_and_text(chunks):
    """Return every token with its index, and the whole text.

    The split into chunks does not matter.
    """
    tokens = [(c.index + i, token) for c in chunks for i, token in enumerate(c.token_ids)]
    return tokens, "".join(c.text for c in chunks)


async def test_a_job_is_streamed_recorded_and_acknowledged(redis_url, database):
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        job = await client.submit(
            prompt="Hello", max_tokens=30, temperature=0, ignore_eos=True, tenant="acme"
        )
        chunks = await collect(client, job)
        result = await client.result(job, timeout=60)
        status = await client.status(job)
    assert result.status is JobStatus.SUCCEEDED
    assert result.finish_reason is FinishReason.LENGTH
    assert [place for c in chunks for place in range(c.index, c.end)] == list(range(30))
    assert tuple(t for c in chunks for t in c.token_ids) == result.token_ids
    assert "".join(c.text for c in chunks) == result.text
    assert chunks[-1].status is JobStatus.SUCCEEDED
    assert status.status is JobStatus.SUCCEEDED
    assert result.usage.prompt_tokens == 5
    assert result.usage.completion_tokens == 30
    assert rows(database, "select state, text from jobs") == [("succeeded", result.text)]
    assert rows(database, "select tenant, prompt_tokens, completion_tokens from usage") == [
        ("acme", 5, 30)
    ]


async def test_early_late_and_second_subscribers_get_the_same_tokens(redis_url, database):
    async with client_of(redis_url, database) as client:
        job = await client.submit(prompt="Stream me", max_tokens=60, temperature=0, ignore_eos=True)
        early = asyncio.create_task(collect(client, job))
        async with running_worker(redis_url, database, model="synthetic?step_ms=5"):
            await asyncio.sleep(0.15)
            middle = asyncio.create_task(collect(client, job))
            resumed = asyncio.create_task(collect(client, job, starting_after=10))
            result = await client.result(job, timeout=60)
            late = await collect(client, job)
            seen = [
                tokens_and_text(await early),
                tokens_and_text(await middle),
                tokens_and_text(late),
            ]
            tail, _ = tokens_and_text(await resumed)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1] == result.text
    assert tail == seen[0][0][10:]


async def test_several_tokens_per_chunk_give_the_same_answer(redis_url, database):
    """The engine is a process, so steps come while others are published."""
    prompt = {"prompt": "Stream me", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    async with client_of(redis_url, database) as client:
        async with running_worker(redis_url, database):
            plain = await collect(client, await client.submit(**prompt))
        job = await client.submit(**prompt)
        early = asyncio.create_task(collect(client, job))
        async with running_worker(
            redis_url, database, chunk_tokens=8, in_process=True, model="synthetic?step_ms=5"
        ):
            async for chunk in client.stream(job):
                if chunk.end >= 10:
                    break
            middle = [
                asyncio.create_task(collect(client, job, starting_after=after)) for after in (0, 6)
            ]
            result = await client.result(job, timeout=60)
            late = await collect(client, job)
            seen = [await early, *[await task for task in middle]]
    assert "".join(chunk.text for chunk in plain) == result.text
    texts = ["".join(chunk.text for chunk in chunks) for chunks in (*seen, late)]
    assert texts == [
        result.text,
        result.text,
        result.text[result.choices[0].text_ends[5] :],
        result.text,
    ]
    received = [
        tuple(token for chunk in chunks for token in chunk.token_ids) for chunks in (*seen, late)
    ]
    assert received == [
        result.token_ids,
        result.token_ids,
        result.token_ids[6:],
        result.token_ids,
    ]
    assert max(len(chunk.token_ids) for chunk in seen[0]) > 1, "nothing was gathered"


async def test_the_queue_is_empty_after_a_job_ended(redis_url, database):
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        jobs = [await client.submit(prompt=f"p{i}", max_tokens=5) for i in range(10)]
        for job in jobs:
            await client.result(job, timeout=60)
    redis = Redis.from_url(redis_url)
    keys = [key.decode() async for key in redis.scan_iter()]
    waiting = {key: await redis.xlen(key) for key in keys if ":jobs:" in key}
    await redis.aclose()
    assert not any(waiting.values()), waiting
    assert not [key for key in keys if ":log:" in key or ":owned:" in key], keys


async def test_an_idempotent_submit_is_one_job(redis_url, database):
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        jobs = [
            await client.submit(prompt="Once", max_tokens=5, idempotency_key="key-1")
            for _ in range(3)
        ]
        assert len(set(jobs)) == 1
        await client.result(jobs[0], timeout=60)
        assert await client.submit(prompt="Once", max_tokens=5, idempotency_key="key-1") == jobs[0]
    assert rows(database, "select count(*) from jobs") == [(1,)]


async def test_queued_and_running_jobs_are_cancelled(redis_url, database):
    async with client_of(redis_url, database) as client:
        queued = await client.submit(prompt="never", max_tokens=5)
        await client.cancel(queued)
        assert (await client.status(queued)).status is JobStatus.CANCELLED
        async with running_worker(redis_url, database, model="synthetic?step_ms=10"):
            running = await client.submit(prompt="long", max_tokens=2000, ignore_eos=True)
            async for chunk in client.stream(running):
                if chunk.end > 5:
                    await client.cancel(running)
            result = await client.result(running, timeout=60)
            neighbour = await client.submit(prompt="after", max_tokens=3, ignore_eos=True)
            assert (await client.result(neighbour, timeout=60)).status is JobStatus.SUCCEEDED
    assert result.status is JobStatus.CANCELLED
    assert 5 < result.usage.completion_tokens < 500
    states = rows(database, "select state from jobs order by created_ms")
    assert states == [("cancelled",), ("cancelled",), ("succeeded",)]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_deadline_that_passes_while_the_job_runs_is_in_stream_result_and_row(
    redis_url, database, n
):
    """The error stands in the last chunk, in the result, and in the SQL row that webhooks are made
    of.
    """
    slow = running_worker(redis_url, database, model="synthetic?step_ms=10")
    async with slow, client_of(redis_url, database) as client:
        job = await client.submit(
            prompt="long", max_tokens=2000, ignore_eos=True, deadline=0.5, n=n
        )
        chunks = await collect(client, job)
        result = await client.result(job, timeout=60)
    assert result.status is JobStatus.EXPIRED
    assert result.usage.completion_tokens > 0
    assert result.error is not None
    assert result.error.code == "deadline_exceeded"
    assert chunks[-1].error == result.error
    found = rows(database, "select error_code, error_message from jobs")
    assert found == [("deadline_exceeded", result.error.message)]


async def test_a_deadline_that_passes_while_the_job_waits_is_in_stream_result_and_row(
    redis_url, database
):
    async with client_of(redis_url, database) as client:
        job = await client.submit(prompt="late", max_tokens=5, deadline=0.05)
        await asyncio.sleep(0.1)
        async with running_worker(redis_url, database):
            result = await client.result(job, timeout=60)
    assert result.error is not None
    assert (result.status, result.error.code) == (JobStatus.EXPIRED, "deadline_exceeded")


async def test_a_stop_string_cuts_the_text_and_tokens_are_billed_up_to_it(redis_url, database):
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        whole = await client.result(
            await client.submit(prompt="Cut", max_tokens=60, temperature=0, ignore_eos=True),
            timeout=60,
        )
        stop = whole.text[20:23]
        expected = whole.text[: whole.text.index(stop)]
        job = await client.submit(
            prompt="Cut", max_tokens=60, temperature=0, ignore_eos=True, stop=[stop]
        )
        chunks = await collect(client, job)
        cut = await client.result(job, timeout=60)
    assert cut.text == expected == "".join(c.text for c in chunks)
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.usage.completion_tokens == len(cut.token_ids)
    assert len((expected + stop).encode()) == len(cut.token_ids)


async def test_bulk_without_streaming_gives_the_same_result(redis_url, database):
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        asked = {"prompt": "Same", "max_tokens": 70, "seed": 3, "ignore_eos": True}
        streamed = await client.result(await client.submit(**asked), timeout=60)
        bulk = await client.result(
            await client.submit(**asked, stream=False, priority="bulk"), timeout=60
        )
    assert bulk.text == streamed.text
    assert bulk.token_ids == streamed.token_ids


async def test_several_choices_are_streamed_and_recorded(redis_url, database):
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        job = await client.submit(prompt="Many", max_tokens=12, n=3, seed=5, ignore_eos=True)
        chunks = await collect(client, job)
        result = await client.result(job, timeout=60)
    assert [len(choice.token_ids) for choice in result.choices] == [12, 12, 12]
    assert len({choice.text for choice in result.choices}) == 3
    for choice in result.choices:
        assert "".join(c.text for c in chunks if c.choice == choice.index) == choice.text
    assert result.usage.completion_tokens == 36
