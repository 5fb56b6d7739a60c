"""Starts a real server with ops/deploy/redis: the configuration means what it says, and each user
of the ACL file can do all of its work and nothing else.
"""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.message import Message

from tests.support.valkey import ControlledValkey
from tokenmill import Client
from tokenmill.transport.connect import connect_async
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobResult, JobStatus
from tokenmill_worker.jobs import ChunkAppend, FinishedJob
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = pytest.mark.redis
FOLDER = Path(__file__).parents[2] / "ops" / "deploy" / "redis"
QUEUE = "q"

MakeValkey = Callable[..., ControlledValkey]


def test_a_server_accepts_every_line_of_the_configuration(make_valkey: MakeValkey) -> None:
    server = make_valkey(settings={"include": str(FOLDER / "redis.conf")})
    with server.client() as client:
        kept = client.config_get(
            "appendonly", "appendfsync", "maxmemory-policy", "client-output-buffer-limit"
        )
    assert kept["appendonly"] == "yes"
    assert kept["appendfsync"] == "everysec"
    assert kept["maxmemory-policy"] == "noeviction"
    assert "pubsub 16777216 4194304 20" in kept["client-output-buffer-limit"]


@pytest.fixture
def server(make_valkey: MakeValkey, tmp_path: Path) -> ControlledValkey:
    rules = tmp_path / "users.acl"
    text = (FOLDER / "users.acl").read_text()
    other = next(line for line in text.splitlines() if line.startswith("user producer "))
    rules.write_text(
        text + other.replace("user producer ", "user elsewhere ").replace("tm:", "other:") + "\n"
    )
    return make_valkey(settings={"aclfile": str(rules)})


def url(server: ControlledValkey, user: str) -> str:
    password = "change-me-producer" if user == "elsewhere" else f"change-me-{user}"
    return f"redis://{user}:{password}@127.0.0.1:{server.port}/0"


def client(server: ControlledValkey, user: str, **options: Any) -> Client:
    return Client(url(server, user), queue=QUEUE, **options)


@pytest.fixture
async def stream(server: ControlledValkey) -> AsyncIterator[JobStream]:
    async with connect_async(url(server, "worker")) as connection:
        yield JobStream(connection, Keys(QUEUE), "w1")


async def test_a_job_runs_from_submit_to_result_under_the_shipped_users(
    server: ControlledValkey, stream: JobStream
) -> None:
    await stream.open()
    with client(server, "producer") as producer, client(server, "reader") as reader:
        job = str(producer.submit(prompt="a", idempotency_key="k"))
        waiting = producer.submit(prompt="b", tenant="t")
        assert producer.submit(prompt="a", idempotency_key="k") == job
        assert producer.cancel(waiting) == "cancelled"
        await stream.heartbeat(WorkerStatus(worker_id="w1"))
        taken = {delivery.job_id: delivery for delivery in await stream.claim(4)}
        token = taken[job].token
        assert not await stream.append(
            [ChunkAppend(token, Chunk(job_id=job, index=0, token_ids=(7,), text="hi"), 0)]
        )
        assert reader.status(job).status is JobStatus.RUNNING
        assert [worker.worker_id for worker in reader.workers()] == ["w1"]
        assert reader.depth() is not None
        assert reader.overview().running == 2
        final = Chunk(
            job_id=job, index=1, finish_reason=FinishReason.STOP, status=JobStatus.SUCCEEDED
        )
        result = JobResult(job_id=job, status=JobStatus.SUCCEEDED)
        assert await stream.finish([FinishedJob(token, result, final)]) == [True]
        assert reader.result(job, timeout=60).status is JobStatus.SUCCEEDED
        assert list(reader.stream(job))[-1].is_last
        assert producer.list() is not None
        assert await stream.resign() >= 0
    with server.client(username="operator", password="change-me-operator") as operator:
        refused = [(entry["username"], entry["object"]) for entry in operator.acl_log()]
    assert refused == [], "a user was refused something that its work needs"


def test_celery_can_work_as_the_tasks_user(server: ControlledValkey) -> None:
    options = {"global_keyprefix": "tm:tasks:"}
    got: list[object] = []
    with Connection(url(server, "tasks"), transport_options=options) as connection:
        queue = Queue("upkeep", Exchange("upkeep"), routing_key="upkeep")
        with connection.Producer() as producer:
            producer.publish(
                {"n": 1}, exchange=queue.exchange, routing_key="upkeep", declare=[queue]
            )

        def take(body: object, message: Message) -> None:
            got.append(body)
            message.ack()

        with connection.Consumer(queue, callbacks=[take]):
            connection.drain_events(timeout=30)
    assert got == [{"n": 1}]


def test_a_reader_cannot_write(server: ControlledValkey) -> None:
    with client(server, "producer") as producer, client(server, "reader") as reader:
        job = producer.submit(prompt="a")
        with pytest.raises(Exception, match="permission"):
            reader.submit(prompt="b")
        with pytest.raises(Exception, match="permission"):
            reader.cancel(job)
        assert producer.status(job).status is JobStatus.QUEUED


@pytest.mark.parametrize("user", ["producer", "worker", "reader", "tasks", "gateway"])
@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "KEYS *", "CONFIG GET *", "MONITOR", "CLIENT LIST", "ACL LIST", "GET alien"],
)
def test_no_role_may_inspect_or_destroy_the_server(
    server: ControlledValkey, user: str, command: str
) -> None:
    with (
        redis.Redis.from_url(url(server, user)) as connection,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        connection.execute_command(*command.split())


def test_a_producer_can_neither_claim_nor_read_other_prefixes(server: ControlledValkey) -> None:
    with client(server, "producer") as ours, client(server, "elsewhere", prefix="other:") as theirs:
        job = theirs.submit(prompt="secret")
        keys = Keys(QUEUE, "other:")
        connection = redis.Redis.from_url(url(server, "producer"))
        for command in (
            ("HGETALL", keys.job(job)),
            ("XRANGE", keys.log(job), "-", "+"),
            ("SUBSCRIBE", keys.chunks(job)),
            (
                "XREADGROUP",
                "GROUP",
                "workers",
                "all",
                "STREAMS",
                Keys(QUEUE).base + "jobs:standard",
                ">",
            ),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                connection.execute_command(*command)
        connection.close()
        assert ours.submit(prompt="mine")


def test_a_connection_without_a_user_name_is_refused(server: ControlledValkey) -> None:
    with server.client() as anonymous, pytest.raises(redis.exceptions.AuthenticationError):
        anonymous.ping()
