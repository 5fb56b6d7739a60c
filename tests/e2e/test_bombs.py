"""Small bytes that stand for much, and values that break naive code, through a running worker: one
sentence for each, and the jobs beside them do not notice.
"""

import msgpack
import pytest
from redis.asyncio import Redis

from tests.fuzz.test_fuzz import BOMBS
from tests.support.worker import QUEUE, client_of, database_url, running_worker
from tokenmill.errors import InvalidRequest
from tokenmill_schemas.job import Priority
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobStatus

pytestmark = pytest.mark.redis

HEAD = {"job_id": "x", "prompt": "hi"}


def packed(**fields):
    return msgpack.packb(HEAD | fields, unicode_errors="surrogatepass")


def deep(levels, inside=None):
    for _ in range(levels):
        inside = {"a": inside}
    return inside


RAW = {name: payload for name, (payload, _) in BOMBS.items()} | {
    "deep schema": packed(params={"response_format": {"json_schema": deep(100)}}),
    "very deep schema": b"\x81\xa6params\x81\xafresponse_format\x81\xabjson_schema"
    + b"\x81\xa1a" * 200_000
    + b"\xc0",
    "deep metadata": packed(metadata=deep(300)),
    "gigantic integer": packed(params={"max_tokens": 2**64 - 1}),
    "gigantic ids": packed(prompt=None, prompt_ids=[2**63]),
    "nan": packed(params={"temperature": float("nan")}),
    "infinite bias": packed(params={"logit_bias": {5: float("inf")}}),
    "surrogate": packed(prompt="a\ud800"),
    "surrogate in a schema": packed(params={"response_format": {"json_schema": {"\ud800": 1}}}),
    "huge regex": packed(params={"response_format": {"regex": "a" * 300_000}}),
    "huge grammar": packed(params={"response_format": {"grammar": "x" * 300_000}}),
    "many stops": packed(params={"stop": ["x"] * 5_000}),
    "long stop": packed(params={"stop": ["x" * 100_000]}),
    "many choices": packed(params={"n": 1_000_000}),
    "ext type": packed(metadata=msgpack.ExtType(5, b"x" * 100)),
    "huge header": b"\x82\xa6job_id\xa1x\xaaprompt_ids\xdd\xff\xff\xff\xff\x01",
    "huge string header": b"\x82\xa6job_id\xa1x\xa6prompt\xdb\xff\xff\xff\xffabc",
}


async def test_each_bomb_fails_with_one_sentence_and_other_jobs_end(redis_url, tmp_path):
    database = database_url(tmp_path)
    keys, bad = Keys(QUEUE), {}
    async with client_of(redis_url, database) as client, Redis.from_url(redis_url) as redis:
        good = [
            await client.submit(prompt=f"good {i}", max_tokens=8, ignore_eos=True) for i in range(3)
        ]
        for name, payload in RAW.items():
            bad[name] = await client.submit(prompt="to be replaced", max_tokens=4)
            await redis.hset(keys.job(bad[name]), "request", payload)
        by_hand = dict(list(RAW.items())[::3])
        for number, payload in enumerate(by_hand.values()):
            await redis.xadd(
                keys.tenant_stream(Priority.STANDARD), {"job": f"hand{number}", "request": payload}
            )
        async with running_worker(redis_url, database):
            results = {name: await client.result(job, timeout=60) for name, job in bad.items()}
            results |= {
                f"hand{number}": await client.result(f"hand{number}", timeout=60)
                for number in range(len(by_hand))
            }
            good += [
                await client.submit(prompt=f"after {i}", max_tokens=8, ignore_eos=True)
                for i in range(3)
            ]
            ended = [await client.result(job, timeout=60) for job in good]
    for name, result in results.items():
        assert result.status is JobStatus.FAILED, name
        assert result.error.code == "invalid_request", (name, result.error)
        words = result.error.message
        assert 15 < len(words) < 400, (name, words)
        assert "\n" not in words, name
        assert "Traceback" not in words, name
    assert {(result.status, result.usage.completion_tokens) for result in ended} == {
        (JobStatus.SUCCEEDED, 8)
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"logit_bias": dict.fromkeys(range(1_000_000), 0.0)},
            "logit_bias may have 1024 entries, not 1000000",
        ),
        ({"stop": ["x"] * 100_000}, "stop may have 16 strings, not 100000"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature must be from 0 to 100, not nan"),
        ({"deadline": float("inf")}, "deadline is no time"),
        (
            {"metadata": {str(i): "x" for i in range(100_000)}},
            "metadata may have 64 entries, not 100000",
        ),
        ({"response_format": {"json_schema": deep(5_000)}}, "recursion|nested deeper"),
        ({"response_format": {"json_schema": {"a": 10**40}}}, "64 bits|out of range|too large"),
    ],
)
async def test_the_producer_refuses_a_bomb_before_it_is_sent(redis_url, arguments, says):
    async with client_of(redis_url) as client:
        with pytest.raises(InvalidRequest, match=says):
            await client.submit(prompt="hi", **arguments)
        assert (await client.depth()).num_queued == 0
