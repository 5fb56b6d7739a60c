"""The checker sees each broken promise that a test breaks on purpose."""

import json

import msgspec
import pytest
import sqlalchemy
from redis import Redis

from tests.chaos.checker import Received, Wanted, left_in_redis, violations
from tests.chaos.details import Details
from tests.chaos.recorded_times import wrong_times
from tests.chaos.witness import Witness
from tests.support.worker import QUEUE, database_url
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.result import JobStatus

pytestmark = pytest.mark.chaos

ANSWER = (((1, 2), "ab"),)
WANTED = {"j": Wanted(ANSWER, prompt_tokens=3)}


@pytest.fixture
def store(tmp_path):
    """Write a job's row, as the worker would or worse."""
    url = database_url(tmp_path)
    engine = sqlalchemy.create_engine(url)

    def write(
        job="j",
        *,
        token_ids=(1, 2),
        text="ab",
        state="succeeded",
        billed=(3, 2),
        with_usage=True,
        more=None,
    ):
        result = {"choices": [{"token_ids": token_ids, "text": text} | (more or {})]}
        common = {"queue": QUEUE, "model": "m", "tenant": "", "state": state, "finished_ms": 9}
        row = common | {
            "id": job,
            "priority": "bulk",
            "text": text,
            "token_ids": json.dumps(token_ids),
            "attempts": 1,
        }
        row |= {
            "worker_id": "w",
            "created_ms": 1,
            "started_ms": 5,
            "result": msgspec.msgpack.encode(result),
        }
        usage = common | dict.fromkeys(
            ("cached_tokens", "queue_ms", "ttft_ms", "total_ms", "preemptions"), 0
        )
        usage |= {
            "job_id": job,
            "day": "2020-01-01",
            "prompt_tokens": billed[0],
            "completion_tokens": billed[1],
        }
        with engine.begin() as connection:
            for table, values in (("jobs", row), ("usage", usage))[: 1 + with_usage]:
                names = ", ".join(values)
                places = ", ".join(f":{name}" for name in values)
                connection.execute(
                    sqlalchemy.text(f"insert into {table} ({names}) values ({places})"), values
                )

    write.engine = engine
    yield url, write
    engine.dispose()


def received(*tokens, text="ab", index=0, status=JobStatus.SUCCEEDED):
    listener = Received()
    listener.receive(Chunk(job_id="j", index=index, token_ids=tokens, text=text))
    if status:
        listener.receive(Chunk(job_id="j", index=index + len(tokens), status=status))
    return {"j": [listener]}


def test_a_correct_run_has_no_violations(store):
    url, write = store
    write()
    assert violations(url, WANTED, received(1, 2)) == []


def test_a_lost_row_is_a_violation(store):
    url, write = store
    assert {item.words for item in violations(url, WANTED, {})} == {
        "job j has no result row",
        "job j has no usage row",
    }
    write(with_usage=False)
    assert [item.kind for item in violations(url, WANTED, {})] == ["loss"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"state": "failed"}, "is failed"),
        ({"text": "ax"}, "differs from the undisturbed"),
        ({"token_ids": (1, 3)}, "differs from the undisturbed"),
        ({"billed": (3, 4)}, "billed (3, 4)"),
        ({"billed": (6, 2)}, "billed (6, 2)"),
        ({"job": "stranger"}, "never accepted"),
    ],
)
def test_a_wrong_row_is_a_violation(store, row, words):
    url, write = store
    write(**row)
    assert any(words in item.words for item in violations(url, WANTED, {}))


def test_a_job_that_began_too_early_is_a_violation(store):
    url, write = store
    write()
    wanted = {"j": Wanted(ANSWER, 3, not_before_ms=7)}
    assert [item.words for item in violations(url, wanted, {})] == [
        "job j began 2 ms before it was due"
    ]


def test_times_outside_the_run_are_violations(store):
    url, write = store
    write()
    assert wrong_times(url, 0) == []
    assert [item.words for item in wrong_times(url, 90_000)] == [
        "job j was created, started and finished -90.0, -90.0, -90.0 s after the begin"
    ]
    with write.engine.begin() as connection:
        connection.execute(sqlalchemy.text("update jobs set finished_ms = 99999999999999"))
        connection.execute(sqlalchemy.text("update usage set total_ms = -90000"))
    assert [item.words for item in wrong_times(url, 0)] == [
        "job j was created, started and finished 0.0, 0.0, 100000000000.0 s after the begin",
        "job j took [0, 0, -90000] ms in the queue, to a token, in all",
    ]


def test_a_broken_off_answer_that_is_no_prefix_of_the_undisturbed_one_is_a_violation(store):
    url, write = store
    write(token_ids=(1,), text="b", state="cancelled", billed=(3, 1))
    wanted = {"j": Wanted(ANSWER, 3, frozenset({"cancelled"}))}
    assert any("does not begin with" in item.words for item in violations(url, wanted, {}))


@pytest.mark.parametrize(
    ("text", "is_wrong"), [("abx", False), ("abxy", True), ("aby", True), ("ab", False)]
)
def test_a_broken_off_answer_may_end_with_part_of_a_stop_string(store, text, is_wrong):
    """The job was cancelled before it was known if the stop string would come."""
    url, write = store
    write(text=text, state="cancelled")
    wanted = {"j": Wanted(ANSWER, 3, frozenset({"cancelled"}), stops=("xy",))}
    assert (
        any("does not begin with" in item.words for item in violations(url, wanted, {})) is is_wrong
    )


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (received(1, 2, status=None), "no end"),
        (received(1), "another answer"),
        (received(1, 2, text="a"), "another answer"),
        (received(2, index=1), "a chunk at 1"),
        (received(1, 2, status=JobStatus.CANCELLED), "received the state cancelled"),
    ],
)
def test_a_wrong_chunk_of_a_subscriber_is_a_violation(store, got, words):
    url, write = store
    write()
    assert any(words in item.words for item in violations(url, WANTED, got))


MORE = {
    "finish_reason": "tool_calls",
    "reasoning": "hm",
    "tool_calls": [{"id": "c", "name": "f", "arguments": "{}"}],
    "logprobs": [[-0.5, [[7, -0.5]]], [-1.0]],
}
DETAILS = Details(("tool_calls",), ("hm",), ((("f", "{}"),),), ((-0.5, -0.5, -1.0),))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"finish_reason": "stop"}, "reasons"),
        ({"reasoning": "h"}, "thoughts"),
        ({"tool_calls": []}, "calls"),
        ({"tool_calls": [{"id": "c", "name": "f", "arguments": "{1}"}]}, "calls"),
        ({"logprobs": [[-0.5, [[7, -0.5]]], [-1.1]]}, "logprobs"),
        ({"logprobs": [[-0.5, [[7, -0.5]]]]}, "logprobs"),
    ],
)
def test_a_detail_that_differs_from_the_undisturbed_run_is_a_violation(store, change, name):
    url, write = store
    wanted = {"j": Wanted(ANSWER, 3, details=DETAILS)}
    write(more=MORE | change)
    assert [item.words for item in violations(url, wanted, {})] == [
        f"job j: the {name} differ from the undisturbed run's"
    ]


def test_a_column_has_another_character_for_a_zero(store):
    url, write = store
    write(text="a\ufffd", more={"text": "a\0"})
    assert violations(url, {"j": Wanted((((1, 2), "a\0"),), 3)}, {}) == []
    write("k", text="a", more={"text": "a\0"})
    words = [item.words for item in violations(url, {}, {})]
    assert "job k: the columns and the encoded result differ" in words


def test_details_that_differ_by_rounding_alone_are_no_violation(store):
    url, write = store
    write(more=MORE | {"logprobs": [[-0.50001, [[7, -0.5]]], [-1.0]]})
    assert violations(url, {"j": Wanted(ANSWER, 3, details=DETAILS)}, {}) == []


@pytest.mark.parametrize(("thoughts", "arguments"), [("h", "{}"), ("hm", "{"), ("hm", None)])
def test_a_subscriber_without_a_thought_or_a_call_is_a_violation(store, thoughts, arguments):
    url, write = store
    write(more=MORE)
    got = received(1, 2)
    one = got["j"][0]
    one.thoughts[0] = thoughts
    one.calls[0] = {0: f"f{arguments}"} if arguments else {}
    assert [item.words for item in violations(url, WANTED, got)] == [
        "subscriber 0 of job j received other thoughts or calls than the result has"
    ]
    one.thoughts[0], one.calls[0] = "hm", {0: "f{}"}
    assert violations(url, WANTED, got) == []


def call(write, event="job.succeeded", job="j", name="w1"):
    """Write a row of the outbox."""
    row = {"id": name, "job_id": job, "queue": QUEUE, "tenant": "", "event": event, "url": "u"}
    row |= {"host": "h", "state": "pending", "attempts": 0, "ended_ms": 9, "due_ms": 9}
    names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
    with write.engine.begin() as connection:
        connection.execute(
            sqlalchemy.text(f"insert into webhooks ({names}) values ({places})"), row
        )


def test_webhooks_that_are_lost_doubled_or_not_asked_for_are_violations(store):
    url, write = store
    wanted = {"j": Wanted(ANSWER, 3, has_webhook=True)}
    write()
    assert [item.kind for item in violations(url, wanted, {})] == ["loss"]
    call(write)
    assert violations(url, wanted, {}) == []
    assert [item.words for item in violations(url, WANTED, {})] == [
        "job j has 1 webhooks job.succeeded, and may have none"
    ]
    call(write, name="w2")
    assert [item.kind for item in violations(url, wanted, {})] == ["duplicate"]
    call(write, event="job.failed", name="w3")
    assert len(violations(url, wanted, {})) == 2


def test_keys_and_counters_left_in_redis_are_violations(redis_url, allowed_keys):
    allowed_keys.append("*")
    base = f"tm:{{{QUEUE}}}:"
    with Redis.from_url(redis_url) as redis:
        redis.hset(f"{base}job:j", mapping={"state": "succeeded", "settled": "1"})
        redis.hset(f"{base}meta", mapping={"submitted": 1, "finished:succeeded": 1})
        assert left_in_redis(redis, QUEUE, {"j": "succeeded"}) == []
        redis.hset(f"{base}meta", mapping={"submitted": 2, "finished:succeeded": 2, "running": 1})
        redis.sadd(f"{base}owned:w", "j")
        redis.hset(f"{base}tenants", "j", "t")
        redis.xadd(f"{base}jobs:bulk", {"job": "j"})
        redis.zadd(f"{base}delayed", {"j": 1})
        redis.hdel(f"{base}job:j", "settled")
        words = " ".join(item.words for item in left_in_redis(redis, QUEUE, {"j": "succeeded"}))
    for part in (
        "2 submissions",
        "2 jobs were settled",
        "owned:w is left",
        "tenants is left",
        "jobs:bulk still",
        "delayed is left",
    ):
        assert part in words
    assert "settled: None" in words
    assert "as running" in words


async def test_a_token_or_end_published_twice_is_a_violation(redis_url):
    witness = Witness(redis_url, QUEUE)
    try:
        for _ in range(2):
            witness.receive({"job_id": "j", "index": 4, "token_ids": [7]})
        witness.receive({"job_id": "j", "index": 5, "token_ids": [8], "status": "succeeded"})
        assert [item.words for item in witness.violations()] == [
            "token 4 of choice 0 of job j was published 2 times"
        ]
        witness.receive({"job_id": "j", "index": 6, "status": "succeeded"})
        assert len(witness.violations()) == 2
    finally:
        await witness.close()
