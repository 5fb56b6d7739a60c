"""A job for a queue that no worker has ever served says so; one whose workers are away waits."""

import logging
from typing import Any

import pytest
from celery import Celery
from typer.testing import CliRunner

from tests.support.queue import Queue
from tokenmill import AsyncClient, Client, QueueUnserved, ResultTimeout
from tokenmill.celery import generation_task
from tokenmill.cli import app
from tokenmill.operations.io_requests import ClientOptions, RunScript
from tokenmill.operations.submit import build_request, submit
from tokenmill.testing import InMemoryQueue
from tokenmill.transport.scripts import SUBMIT
from tokenmill_schemas.control import WorkerStatus

pytestmark = pytest.mark.redis
SOON = ClientOptions(unserved_s=0.05, idle_s=0.05)


@pytest.fixture
def url(redis_url: str, allowed_keys: list[str]) -> str:
    allowed_keys.append("tm:{*}:*")  # no worker runs: submitted jobs stay
    return redis_url


def test_submits_to_an_unserved_queue_warn_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with Client(url, queue="nobody") as client, caplog.at_level(logging.WARNING):
        jobs = [client.submit(prompt="x"), *client.submit_many([{"prompt": "y"}, {"prompt": "z"}])]
        assert [(job.is_unserved, job.is_new) for job in jobs] == [(True, True)] * 3
        (warning,) = caplog.messages
        assert warning.startswith(
            f"no worker has ever served the queue 'nobody', so job {jobs[0]} waits: "
        )
        program = submit(client.context, [build_request({"prompt": "x"})])
        effect = next(program)
        assert isinstance(effect, RunScript)
        assert effect.script is SUBMIT
        with pytest.raises(StopIteration):  # one reply says all
            program.send([b"ok", b"a", b"new", b"unserved"])


def test_waiting_on_an_unserved_queue_raises_queue_unserved(url: str) -> None:
    with Client(url, queue="nobody", options=SOON) as client:
        job = client.submit(prompt="x")
        for wait in (lambda: client.result(job), lambda: list(client.stream(job))):
            with pytest.raises(
                QueueUnserved, match="no worker has ever served the queue 'nobody'"
            ) as caught:
                wait()
            assert (caught.value.queue, caught.value.job_id) == ("nobody", job)
        with pytest.raises(ResultTimeout):  # it was the shorter of the two
            client.result(job, timeout=0.01)
        assert client.status(job).status == "queued"
        assert client.is_served() is False


def test_a_job_that_is_not_due_does_not_raise_queue_unserved(url: str) -> None:
    from datetime import timedelta

    with Client(url, queue="nobody", options=SOON) as client:
        job = client.submit(prompt="x", not_before=timedelta(hours=1))
        with pytest.raises(ResultTimeout):
            client.result(job, timeout=0.3)


async def test_the_asynchronous_client_warns_and_raises_alike(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(url, queue="nobody", options=SOON) as client:
        with caplog.at_level(logging.WARNING):
            job = await client.submit(prompt="x")
        assert len(caplog.messages) == 1
        with pytest.raises(QueueUnserved):
            await client.result(job)
        with pytest.raises(QueueUnserved):
            [chunk async for chunk in client.stream(job)]
        assert await client.is_served() is False


@pytest.mark.parametrize("trace", ["opened", "alive", "finished by an earlier version"])
async def test_a_queue_whose_workers_are_away_keeps_its_jobs_waiting(
    queue: Queue, url: str, trace: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = queue.worker()
    if trace == "opened":
        await worker.open()  # and it has gone before it had a job
    elif trace == "alive":
        await worker.heartbeat(WorkerStatus(worker_id="w1"))
        await queue.redis.delete(queue.keys.workers)
    else:
        await queue.redis.hset(queue.keys.meta, "finished:succeeded", 1)
    async with AsyncClient(url, queue=queue.keys.queue, options=SOON) as client:
        job = await client.submit(prompt="x")
        assert (job.is_unserved, caplog.messages) == (False, [])
        with pytest.raises(ResultTimeout):
            await client.result(job, timeout=0.3)
        assert await client.is_served()


def test_unserved_waits_may_be_of_any_length(url: str) -> None:
    options = ClientOptions(unserved_s=None, idle_s=0.05)
    with Client(url, queue="nobody", options=options) as client, pytest.raises(ResultTimeout):
        client.result(client.submit(prompt="x"), timeout=0.3)


@pytest.mark.parametrize(
    ("flags", "queue"),
    [(("--queue", "nobody"), "nobody"), (("--model", "gpt-4"), "gpt-4"), (("--json",), "q")],
)
def test_the_command_line_prints_the_note_without_a_terminal_too(
    url: str, flags: tuple[str, ...], queue: str
) -> None:
    environment = {"TOKENMILL_REDIS_URL": url} | (
        {"TOKENMILL_QUEUE": "q"} if "--json" in flags else {}
    )
    done = CliRunner().invoke(
        app, ["submit", "Hello", *flags], env=environment | {"COLUMNS": "200"}
    )
    assert (done.exit_code, len(done.stdout.split())) == (
        0,
        1 if "--json" not in flags else len(done.stdout.split()),
    )
    assert f"no worker has ever served the queue '{queue}'" in done.stderr
    assert done.stderr.count("no worker") == 1


async def test_the_command_line_names_a_queue_whose_workers_are_away(
    queue: Queue, url: str
) -> None:
    await queue.worker().open()
    environment = {
        "TOKENMILL_REDIS_URL": url,
        "TOKENMILL_QUEUE": queue.keys.queue,
        "COLUMNS": "200",
    }
    done = CliRunner().invoke(app, ["submit", "Hello"], env=environment)
    assert "no worker serves the queue 'q' now; the job waits for one" in done.stderr
    assert "ever" not in done.stderr


def test_a_celery_task_of_an_unserved_queue_ends_with_the_same_sentence(url: str) -> None:
    attributes: dict[str, Any] = {"queue": "nobody", "url": url, "unserved_s": 0.05}
    task = generation_task(
        Celery("unserved", broker="memory://", backend="cache+memory://"), **attributes
    )
    try:
        with pytest.raises(QueueUnserved, match="'nobody'"):
            task.delay("x").get(timeout=60)
    finally:
        task.client.close()


def test_the_in_memory_queue_counts_as_served() -> None:
    with InMemoryQueue() as queue, queue.held():
        client = queue.client()
        assert client.submit(prompt="x").is_unserved is False
        assert client.is_served()
