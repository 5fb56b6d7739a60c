"""Generation as a Celery task: by itself without a Celery worker; in chains, groups and chords
with a real one.
"""

import asyncio
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import celery.exceptions
import pytest
from celery import Celery, chain, chord, group

from tests.support.topologies import wait_until
from tests.support.valkey import ControlledValkey
from tests.support.worker import QUEUE, database_url, running_worker
from tokenmill import Client
from tokenmill.celery import GenerationResult, GenerationTask, generation_task
from tokenmill.celery.values import GenerationFailed
from tokenmill.errors import InvalidRequest, JobNotFound, QueueUnavailable
from tokenmill_schemas import JobStatus

pytestmark = pytest.mark.redis
WAIT_S = 90
BACKEND = "tests.client.celery.backend_app"
GUIDE = (Path(__file__).parents[3] / "ops" / "guides" / "celery.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def url(valkey: ControlledValkey) -> Iterator[str]:
    """A server of its own: other tests empty the shared one. `valkey` skips or fails where there
    is no binary.
    """
    server = ControlledValkey(persistent=False).start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def service(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A tokenmill worker without a model, in a thread of its own."""
    database = database_url(tmp_path_factory.mktemp("db"))
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running_worker(url, database, model="synthetic?step_ms=2"):
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def app(url: str) -> Celery:
    """Made anew for each server: tests of other modules may run between those of this one, which
    ends its fixtures.
    """
    os.environ["BACKEND_REDIS_URL"] = url  # noqa: TID251
    sys.modules.pop(BACKEND, None)
    made: Celery = importlib.import_module(BACKEND).app
    return made


@pytest.fixture(scope="module")
def celery_worker(
    app: Celery, url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """`celery -A tests.client.celery.backend_app worker`, another process."""
    log = tmp_path_factory.mktemp("celery") / "worker.log"
    command = [sys.executable, "-m", "celery", "-A", BACKEND, "worker", "-P", "threads", "-c", "3"]
    flags = ["--without-mingle", "--without-gossip", "--without-heartbeat", "-l", "info"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *flags], stdout=output, stderr=output, cwd=Path(__file__).parents[3]
        )
        # before, a signal would kill it
        wait_until(lambda: " ready." in log.read_text(), "the worker's readiness", WAIT_S)
        yield
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


PROMPTS = (("one", 3), ("a second", 5))


def task(app: Celery, name: str = "tokenmill.generate") -> Any:
    return app.tasks[name]


@pytest.fixture
def lonely(redis_url: str) -> Iterator[GenerationTask]:
    """A task whose queue has no worker, and whose application has no result backend."""
    app = Celery("lonely", broker="memory://", set_as_current=False)
    made = generation_task(app, queue=QUEUE, url=redis_url)
    yield made
    made.client.close()


@pytest.mark.slow
class TestWithWorkers:
    @pytest.fixture(autouse=True)
    def _servers(self, service: None, celery_worker: None) -> None:
        pass

    def test_a_chain_passes_the_answer_on(self, app: Celery) -> None:
        work = chain(
            task(app).s("a b c", max_tokens=4),
            task(app).s(template="again: {text}", max_tokens=3),
            task(app, "shout").s(),
        )
        answer = work.delay()
        assert answer.get(timeout=WAIT_S).startswith("<")
        first, second = answer.parent.parent, answer.parent
        assert isinstance(second, GenerationResult)
        assert first.get(timeout=WAIT_S)["usage"]["completion_tokens"] == 4
        assert answer.get() == f"<{second.get()['text']}>"

    def test_a_group_returns_all_answers_in_order(self, app: Celery) -> None:
        answers = group(
            task(app).s(f"number {n}", max_tokens=n, ignore_eos=True) for n in range(1, 6)
        ).delay()
        values = answers.get(timeout=WAIT_S)
        assert [value["usage"]["completion_tokens"] for value in values] == [1, 2, 3, 4, 5]
        assert answers.successful()

    def test_a_chord_body_gets_every_answer(self, app: Celery) -> None:
        work = chord(
            [task(app, "tell").s(f"number {n}", max_tokens=2) for n in range(4)],
            task(app, "count").s(),
        )
        assert work.delay().get(timeout=WAIT_S) == 4

    def test_a_generation_is_a_chords_body(self, app: Celery) -> None:
        body = task(app).s(template="Compare:\n{text}", max_tokens=3, ignore_eos=True)
        value = (
            chord([task(app, "tell").s(f"number {n}", max_tokens=2) for n in range(3)], body)
            .delay()
            .get(timeout=WAIT_S)
        )
        assert value["usage"]["completion_tokens"] == 3

    def test_a_direct_call_returns_its_own_answer(self, app: Celery) -> None:
        values = [task(app)(text, max_tokens=count, ignore_eos=True) for text, count in PROMPTS]
        assert [value["usage"]["completion_tokens"] for value in values] == [3, 5]
        assert len({value["job_id"] for value in values}) == 2

    @pytest.mark.parametrize("way", ["map", "starmap", "chunks"])
    def test_each_item_of_map_starmap_and_chunks_gets_its_own_answer(
        self, app: Celery, way: str
    ) -> None:
        texts = [text for text, _ in PROMPTS]
        calls = {
            "map": task(app).map(texts),
            "starmap": task(app).starmap([(text,) for text in texts]),
            "chunks": task(app).chunks([(text,) for text in texts], 2),
        }
        values = calls[way].apply_async().get(timeout=WAIT_S)
        values = values[0] if way == "chunks" else values
        assert [value["usage"]["prompt_tokens"] for value in values] == list(map(len, texts))
        assert len({value["job_id"] for value in values}) == 2

    def test_a_failed_generation_ends_its_chain(self, app: Celery) -> None:
        answer = chain(task(app).s("a", max_tokens=10**6), task(app, "shout").s()).delay()
        with pytest.raises(GenerationFailed, match="the model's length"):
            answer.get(timeout=WAIT_S)

    @pytest.mark.parametrize("in_chain", [False, True])
    def test_a_revoked_generation_ends_as_celery_s_revoked_tasks_do(
        self, app: Celery, in_chain: bool
    ) -> None:
        generation = task(app).s("a b c", max_tokens=4000, ignore_eos=True)
        last = chain(generation, task(app, "shout").s()).delay() if in_chain else generation.delay()
        answer = last.parent if in_chain else last
        while answer.state == "PENDING":
            time.sleep(0.05)
        answer.revoke()
        for result in (answer, last):
            with pytest.raises(celery.exceptions.TaskRevokedError, match="was cancelled"):
                result.get(timeout=WAIT_S)
        assert answer.state == "REVOKED"
        # the Celery worker, which waits for the job, stores the result as well
        if in_chain:
            until = time.monotonic() + WAIT_S
            while {app.backend.get_task_meta(one.id)["status"] for one in (answer, last)} != {
                "REVOKED"
            }:
                assert time.monotonic() < until
                time.sleep(0.05)

    def test_a_deadline_that_passes_is_the_exception_s_reason(self, app: Celery) -> None:
        answer = task(app).apply_async(
            ("a b c",), {"max_tokens": 4000, "ignore_eos": True}, expires=0.7
        )
        with pytest.raises(
            GenerationFailed,
            match=r"expired: the deadline .* passed before the answer was complete",
        ):
            answer.get(timeout=WAIT_S)

    def test_a_link_callback_gets_the_answer(self, app: Celery) -> None:
        callback = task(app, "shout").s()
        kept = callback.freeze()
        task(app).apply_async(("a b",), {"max_tokens": 2}, link=callback)
        assert kept.get(timeout=WAIT_S).startswith("<")

    def test_the_guide_s_code_runs(self, app: Celery, url: str) -> None:
        code = GUIDE.split("app = Celery(", 1)[1].partition("\n")[2].split("```")[0]
        for written, real in (("smollm2-135m-instruct", QUEUE), ("redis://localhost:6379/0", url)):
            assert f'"{written}"' in code
            code = code.replace(f'"{written}"', f'"{real}"')
        # beside the one that has the name
        reader = Celery("reader", broker=url, backend=url, set_as_current=False)
        shared = (
            "broker_transport_options",
            "result_backend_transport_options",
            "task_serializer",
            "accept_content",
        )
        reader.conf.update({name: app.conf[name] for name in shared})
        names = {
            "app": reader, "chain": chain, "group": group, "generation_task": generation_task,
            "save": task(app, "shout"), "texts": ["a b", "c d"],
        }  # fmt: skip
        exec(code, names)  # waits for the answers that it asks for

    def test_without_a_celery_worker_the_answer_comes_from_the_job(self, app: Celery) -> None:
        answer = task(app).delay("a b c", max_tokens=5, ignore_eos=True)
        value = answer.get(timeout=WAIT_S)
        assert (value["usage"]["completion_tokens"], answer.state, answer.successful()) == (
            5,
            "SUCCESS",
            True,
        )
        elsewhere = task(app).AsyncResult(answer.id)
        assert elsewhere.get(timeout=WAIT_S) == value
        # Celery had no part in it
        assert app.backend.get_task_meta(answer.id)["status"] == "PENDING"


def test_without_a_celery_worker_a_task_is_submitted_at_once(
    lonely: GenerationTask, redis_url: str, allowed_keys: list[str]
) -> None:
    allowed_keys.append("tm:{q}:*")
    answer = lonely.apply_async(
        ({"text": "what came before"},), {"template": "Say: {text}", "tenant": "t"}, countdown=3600
    )
    with Client(redis_url, queue=QUEUE) as client:
        assert client.status(answer.id).status is JobStatus.SCHEDULED
    assert (answer.state, answer.ready()) == ("PENDING", False)
    with pytest.raises(celery.exceptions.TimeoutError):
        answer.get(timeout=0.2)
    answer.revoke()
    with pytest.raises(celery.exceptions.TaskRevokedError, match=f"job {answer.id} was cancelled"):
        answer.get(timeout=WAIT_S)
    assert answer.state == "REVOKED"
    assert isinstance(answer.get(propagate=False), celery.exceptions.TaskRevokedError)


class AwayQueue:
    """Its server is out of reach."""

    def submit(self, **_: Any) -> None:
        raise QueueUnavailable("away")

    def result(self, _job: str, timeout: float | None) -> None:
        raise QueueUnavailable("away")


class ForgetfulQueue(AwayQueue):
    def result(self, job: str, timeout: float | None) -> None:
        raise JobNotFound(job)


@pytest.mark.parametrize("queue", [AwayQueue(), ForgetfulQueue()])
def test_a_task_is_retried_later_while_the_queue_is_unreachable(queue: Any) -> None:
    app = Celery("away", broker="memory://", set_as_current=False)
    task = generation_task(app, queue=QUEUE, pauses_s=(7.0,))
    task._clients[os.getpid()] = queue
    task.push_request(
        id="a", retries=0, is_eager=False, called_directly=False, args=("hi",), kwargs={}
    )
    with pytest.raises(celery.exceptions.Retry) as caught:
        task.run("hi")
    assert caught.value.when == 7.0
    with pytest.raises(QueueUnavailable):
        task.apply(("hi",)).get()


NAIVE = datetime(2100, 1, 1, 12)  # noqa: DTZ001


@pytest.mark.parametrize("moment", [NAIVE, "2100-01-01T12:00:00", "2100-01-01T13:00:00+01:00"])
def test_naive_and_zoned_times_are_read_as_celery_reads_them(
    monkeypatch: pytest.MonkeyPatch,
    lonely: GenerationTask,
    redis_url: str,
    allowed_keys: list[str],
    moment: Any,
) -> None:
    allowed_keys.append("tm:{q}:*")
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        begins, ends = (
            lonely.apply_async(("a",), eta=moment),
            lonely.apply_async(("a",), expires=moment),
        )
    finally:
        monkeypatch.undo()
        time.tzset()
    noon_ms = datetime(2100, 1, 1, 12, tzinfo=UTC).timestamp() * 1000
    with Client(redis_url, queue=QUEUE) as client:
        assert (
            client.status(begins.id).not_before_ms == client.status(ends.id).deadline_ms == noon_ms
        )


@pytest.mark.parametrize("options", [{"eta": "soon"}, {"countdown": "5"}, {"expires": "never"}])
def test_an_invalid_time_is_refused(lonely: GenerationTask, options: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequest, match="a time is a number of seconds, a datetime or a timedelta"
    ):
        lonely.apply_async(("a",), **options)


def test_a_bad_request_raises_where_the_task_is_sent(lonely: GenerationTask) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        lonely.delay("a", max_tokens=-1)
    with pytest.raises(InvalidRequest, match="one positional argument"):
        lonely.delay("a", "b")
    with pytest.raises(InvalidRequest, match="NoneType"):
        lonely.delay(None)
