"""Any input of a producer gets an answer and leaves other jobs untouched."""

import msgpack
import pytest
from redis.asyncio import Redis

from tests.support.worker import QUEUE, client_of, database_url, running_worker
from tokenmill.errors import InvalidRequest
from tokenmill_schemas.codec import encode
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobStatus

pytestmark = pytest.mark.redis

RAW = {
    "undecodable": b"\xc1\xff\x00 no message",
    "wrong type": msgpack.packb({"job_id": "x", "prompt": 7}),
    "broken utf-8": b"\x82\xa6job_id\xa1x\xa6prompt\xa3\xff\xfe\xfd",
    "unknown model": encode(JobRequest(job_id="x", prompt="hi", model="gpt-9")),
    "no prompt": encode(JobRequest(job_id="x")),
    "empty prompt": encode(JobRequest(job_id="x", prompt="")),
    "nesting bomb": b"\x81\xa8metadata" + b"\x81\xa1a" * 5000 + b"\xc0",
    "too long": msgpack.packb({"job_id": "x", "prompt": "a" * 5000, "params": {"max_tokens": 4}}),
    "beyond the length": msgpack.packb(
        {"job_id": "x", "prompt": "hi", "params": {"max_tokens": 10**6}}
    ),
    "negative": msgpack.packb({"job_id": "x", "prompt": "hi", "params": {"temperature": -1.0}}),
    "absurd": msgpack.packb(
        {"job_id": "x", "prompt": "hi", "params": {"top_p": 1e300, "n": 10**9}}
    ),
}


async def replace_request(redis_url, job_id, payload):
    """Put bytes of our choice where the producer's request was, as a producer of another make
    could.
    """
    redis = Redis.from_url(redis_url)
    await redis.hset(Keys(QUEUE).job(job_id), "request", payload)
    await redis.aclose()


async def test_each_bad_job_fails_with_a_sentence_beside_good_jobs(redis_url, tmp_path):
    database = database_url(tmp_path)
    async with client_of(redis_url, database) as client:
        good = [
            await client.submit(prompt=f"good {i}", max_tokens=8, ignore_eos=True) for i in range(3)
        ]
        bad = {}
        for name, payload in RAW.items():
            bad[name] = await client.submit(prompt="to be replaced", max_tokens=4)
            await replace_request(redis_url, bad[name], payload)
        good += [
            await client.submit(prompt=f"good {i}", max_tokens=8, ignore_eos=True)
            for i in range(3, 6)
        ]
        async with running_worker(redis_url, database):
            failed = {name: await client.result(job, timeout=30) for name, job in bad.items()}
            succeeded = [await client.result(job, timeout=30) for job in good]
    for name, result in failed.items():
        assert result.status is JobStatus.FAILED, name
        assert result.error is not None
        assert len(result.error.message) > 10, name
        assert "Traceback" not in result.error.message
    assert failed["beyond the length"].error.code == "context_length_exceeded"
    assert failed["unknown model"].error.code == "model_not_found"
    assert {r.status for r in succeeded} == {JobStatus.SUCCEEDED}
    assert {r.usage.completion_tokens for r in succeeded} == {8}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": ""}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": -0.1}, "top_p"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a" * (10 * 2**20)}, "bytes"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": 7}, "prompt"),
    ],
)
async def test_submit_refuses_requests_that_no_model_could_serve(redis_url, arguments, says):
    async with client_of(redis_url) as client:
        with pytest.raises(InvalidRequest, match=says):
            await client.submit(**arguments)
