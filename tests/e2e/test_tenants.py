"""Tenants share no prefix cache: an answer's time does not depend on other tenants' prompts."""

import msgpack
import pytest
from redis.asyncio import Redis

from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.codec import encode
from tokenmill_schemas.job import JobRequest

pytestmark = pytest.mark.redis

PROMPT = "The same long beginning, word for word, of what several tenants ask. " * 8


async def cached(client, **fields):
    job = await client.submit(**{"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **fields})
    return (await client.result(job, timeout=30)).usage.cached_tokens


async def test_a_prefix_is_found_by_its_own_tenant_only(redis_url, tmp_path):
    database = database_url(tmp_path)
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        firsts = {
            tenant: await cached(client, tenant=tenant)
            for tenant in ("", "acme", "other", "acme2", "a")
        }
        again = {tenant: await cached(client, tenant=tenant) for tenant in firsts}
        chat = [{"role": "user", "content": PROMPT}]
        longer = await cached(client, tenant="acme", prompt=PROMPT + "And more.")
        by_chat = await cached(client, tenant="third", prompt=None, messages=chat)
    assert set(firsts.values()) == {0}
    assert all(tokens > len(PROMPT) // 2 for tokens in again.values()), again
    assert longer > len(PROMPT) // 2
    assert by_chat == 0


async def test_a_salt_set_by_the_producer_does_not_open_another_tenant_s_cache(redis_url, tmp_path):
    """Salt is the worker's to set; what a producer writes under that name is passed over."""
    database = database_url(tmp_path)
    async with (
        running_worker(redis_url, database),
        client_of(redis_url, database) as client,
    ):
        await cached(client, tenant="acme")
        spy = await client.submit(prompt=PROMPT, tenant="spy", not_before=4_000_000_000)
        fields = msgpack.unpackb(encode(JobRequest(job_id=spy, prompt=PROMPT, tenant="spy")))
        fields |= {"cache_salt": "acme", "salt": "acme"}
        fields["params"] = {"max_tokens": 4, "ignore_eos": True, "cache_salt": "acme"}
        async with Redis.from_url(redis_url) as redis:
            await redis.hset(client.keys.job(spy), "request", msgpack.packb(fields))
            await redis.zadd(client.keys.delayed, {spy: 1})
        result = await client.result(spy, timeout=30)
    assert result.usage.completion_tokens == 4
    assert result.usage.cached_tokens == 0
