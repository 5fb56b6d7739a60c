"""Parts of the worker die or misbehave; no job is lost, and no token is sent twice."""

import asyncio
import os
import signal
from functools import partial

import pytest

from tests.support.engine_thread import EngineThread
from tests.support.worker import client_of, database_url, running_worker, settings
from tokenmill_schemas.job import RetryPolicy
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.app import Worker
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.serve import serve_loaded
from tokenmill_worker.engines.synthetic.runner import SyntheticRunner
from tokenmill_worker.publish.publisher import Publisher

pytestmark = pytest.mark.redis


async def test_an_engine_crash_fails_the_crashing_job_alone(redis_url, tmp_path):
    database = database_url(tmp_path)
    model = "synthetic?step_ms=3"
    async with client_of(redis_url, database) as client:
        good = [
            await client.submit(prompt=f"good {i}", max_tokens=60, ignore_eos=True, seed=i)
            for i in range(6)
        ]
        poison = await client.submit(prompt="[[crash]]", max_tokens=5)
        async with running_worker(
            redis_url, database, in_process=True, model=model, max_num_seqs=4, max_crashes=2
        ):
            results = [await client.result(job, timeout=60) for job in good]
            dead = await client.result(poison, timeout=60)
    assert {r.status for r in results} == {JobStatus.SUCCEEDED}
    assert {r.usage.completion_tokens for r in results} == {60}
    assert dead.status is JobStatus.DEAD
    assert "crash" in dead.error.message


async def test_a_hanging_engine_is_replaced_and_its_jobs_continue(redis_url, tmp_path):
    database = database_url(tmp_path)
    asked = {"prompt": "freeze me", "max_tokens": 300, "ignore_eos": True, "seed": 3}
    async with (
        running_worker(
            redis_url, database, in_process=True, model="synthetic?step_ms=5", stall_seconds=2
        ) as worker,
        client_of(redis_url, database) as client,
    ):
        job = await client.submit(**asked)
        chunks, under_way = [], asyncio.Event()
        reading = asyncio.create_task(_read(client, job, chunks, under_way))
        await asyncio.wait_for(under_way.wait(), 60)
        frozen = worker.service.supervisor.host.pid
        os.kill(frozen, signal.SIGSTOP)
        result = await client.result(job, timeout=60)
        await reading
        assert worker.service.health.engine_restarts == 1
        with pytest.raises(ProcessLookupError):
            os.kill(frozen, 0)
        undisturbed = await client.result(await client.submit(**asked), timeout=60)
    assert result.status is JobStatus.SUCCEEDED
    assert result.text == undisturbed.text == "".join(c.text for c in chunks)
    assert [place for c in chunks for place in range(c.index, c.end)] == list(range(300))


async def test_a_job_that_hangs_the_engine_is_dead_lettered_and_the_others_end(redis_url, tmp_path):
    database = database_url(tmp_path)
    limits = {
        "model": "synthetic?step_ms=1",
        "stall_seconds": 1,
        "max_num_seqs": 4,
        "max_crashes": 2,
    }
    async with client_of(redis_url, database) as client:
        good = [
            await client.submit(prompt=f"good {i}", max_tokens=20, ignore_eos=True)
            for i in range(4)
        ]
        poison = await client.submit(prompt="[[hang]]", max_tokens=5)
        async with running_worker(redis_url, database, in_process=True, **limits):
            results = [await client.result(job, timeout=90) for job in [*good, poison]]
    assert [result.status for result in results] == [JobStatus.SUCCEEDED] * 4 + [JobStatus.DEAD]


async def test_an_engine_whose_steps_all_fail_is_replaced_without_losing_a_job(redis_url, tmp_path):
    """Memory or disk is gone: the engine is replaced until it works again, and every job is
    answered by it.
    """
    database = database_url(tmp_path)
    config = settings(redis_url, database).engine_config()
    broken = 2  # engines whose steps fail

    class Failing(SyntheticRunner):
        __slots__ = ("is_broken",)

        def finish(self, plan):
            if self.is_broken:
                raise RuntimeError("No space left on device (kernel cache)")
            return super().finish(plan)

    def load():
        nonlocal broken
        runner = Failing.load(config)
        runner.is_broken, broken = broken > 0, broken - 1
        return Engine.around(runner)

    worker = Worker(
        settings(redis_url, database), lambda: EngineThread(partial(serve_loaded, load))
    )
    async with client_of(redis_url, database) as client:
        jobs = [
            await client.submit(prompt=f"job {i}", max_tokens=5, ignore_eos=True)
            for i in range(100)
        ]
        serving = asyncio.create_task(worker.serve())
        results = [await client.result(job, timeout=60) for job in jobs]
        worker.drain()
        await asyncio.wait_for(serving, 60)
    assert {result.status for result in results} == {JobStatus.SUCCEEDED}
    assert worker.service.health.engine_restarts == 2


async def test_a_step_that_raises_fails_only_the_request_at_fault(redis_url, tmp_path):
    database = database_url(tmp_path)
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        jobs = [
            await client.submit(prompt=p, max_tokens=10, ignore_eos=True)
            for p in ("a", "[[fail]]", "b", "c")
        ]
        results = [await client.result(job, timeout=60) for job in jobs]
    assert [r.status for r in results] == [
        JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.SUCCEEDED, JobStatus.SUCCEEDED,
    ]  # fmt: skip
    assert "breaks the step" in results[1].error.message


async def test_a_transient_failure_is_retried_by_the_jobs_own_policy(redis_url, tmp_path):
    database = database_url(tmp_path)
    policy = RetryPolicy(max_attempts=3, backoff_ms=100)
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        once = await client.submit(
            prompt="[[fail]]", max_tokens=5, retry=RetryPolicy(max_attempts=1)
        )
        often = await client.submit(prompt="[[fail]]", max_tokens=5, retry=policy)
        first, last = await client.result(once, timeout=60), await client.result(often, timeout=60)
    assert (first.status, first.attempt) == (JobStatus.FAILED, 1)
    assert (last.status, last.attempt) == (JobStatus.FAILED, 3)
    assert last.finished_ms - last.created_ms >= 300  # 100 and 200 ms of backoff


async def test_a_drained_worker_s_jobs_continue_on_another_at_the_next_token(redis_url, tmp_path):
    database = database_url(tmp_path)
    model = "synthetic?step_ms=10"
    asked = {"prompt": "hand me over", "max_tokens": 400, "ignore_eos": True, "seed": 11}
    async with client_of(redis_url, database) as client:
        async with running_worker(
            redis_url, database, worker_id="first", model=model, drain_seconds=0.0
        ):
            job = await client.submit(**asked)
            chunks, under_way = [], asyncio.Event()
            reading = asyncio.create_task(_read(client, job, chunks, under_way))
            await asyncio.wait_for(under_way.wait(), 60)
        assert (await client.status(job)).status is not JobStatus.SUCCEEDED
        async with running_worker(redis_url, database, worker_id="second"):
            result = await client.result(job, timeout=60)
            await reading
            undisturbed = await client.result(await client.submit(**asked), timeout=60)
    assert result.text == undisturbed.text == "".join(c.text for c in chunks)
    assert [place for c in chunks for place in range(c.index, c.end)] == list(range(400))
    assert result.usage.completion_tokens == 400


async def _read(client, job, chunks, under_way):
    async for chunk in client.stream(job):
        chunks.append(chunk)
        if chunk.end > 20:
            under_way.set()


async def test_a_broken_stage_ends_the_worker_at_once_and_its_jobs_continue_on_another(
    redis_url, tmp_path, monkeypatch
):
    database = database_url(tmp_path)
    handle = Publisher.handle

    async def break_down(self, events):
        if any(event.token_ids for event in events):
            raise KeyError("nobody foresaw this")
        return await handle(self, events)

    async with client_of(redis_url, database) as client:
        job = await client.submit(prompt="go on", max_tokens=10, ignore_eos=True)
        with monkeypatch.context() as patch:
            patch.setattr(Publisher, "handle", break_down)
            worker = Worker(settings(redis_url, database, worker_id="broken", drain_seconds=600))
            with pytest.raises(KeyError, match="nobody foresaw this"):
                await asyncio.wait_for(worker.serve(), 60)
        async with running_worker(redis_url, database, worker_id="second"):
            assert (await client.result(job, timeout=60)).status is JobStatus.SUCCEEDED
