"""`tokenmill keys`: keys, a tenant's limits and its webhook, and what a gateway makes of them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from tests.gateway.conftest import MODEL, new_key, running_gateway
from tests.support.waiting import until
from tests.support.worker import QUEUE, client_of, running_worker
from tokenmill.errors import ConfigurationError
from tokenmill_gateway.commands import app
from tokenmill_gateway.keys import KeyStore

LIMITED: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 2}


def keys(*arguments: str, **variables: str) -> str:
    """Run `tokenmill keys` and return what it prints. Raises what it would say."""
    done = CliRunner().invoke(app, ["keys", *arguments], env=variables)
    if done.exception is not None:
        raise done.exception
    return done.output.strip()


def test_a_rotated_key_has_a_successor_like_it_and_ends(database: str) -> None:
    env = {"TOKENMILL_DATABASE_URL": database, "TOKENMILL_GATEWAY_KEY_SECRET": "secret"}
    first = keys("create", "acme", "--label", "web", "--model", "m", "--read-only", **env)
    second = keys("rotate", first.split("-")[1], "--hours", "0", **env)
    listed = {key["id"]: key for key in json.loads(keys("list", "acme", "--json", **env))}
    old, new = (listed.pop(text.split("-")[1]) for text in (first, second))
    assert listed == {}
    same = ("tenant", "label", "models", "permission", "priority")
    assert [old[name] for name in same] == [new[name] for name in same]
    assert (old["expires_ms"] is not None, new["expires_ms"]) == (True, None)
    assert [line.split()[2] for line in keys("list", **env).splitlines()].count("valid") == 1
    with pytest.raises(ConfigurationError, match="neither revoked nor over"):
        keys("rotate", old["id"], **env)


def test_a_tenant_s_webhook_is_shown_with_its_keys_and_removed(database: str) -> None:
    env = {"TOKENMILL_DATABASE_URL": database}
    keys("create", "acme", **env)
    keys("webhook", "acme", "https://example.com/a", **env)
    said = keys("webhook", "acme", "https://user:pass@example.com/b?token=secret", **env)
    assert said == "the webhooks of acme go to https://example.com/b?token=***"
    store = KeyStore(database, "")
    try:
        (key,) = store.list("acme")
        assert key.webhook == "https://user:pass@example.com/b?token=secret"
        keys("webhook", "acme", **env)
        assert store.list("acme")[0].webhook is None
    finally:
        store.close()
    with pytest.raises(ConfigurationError, match="http or https URL"):
        keys("webhook", "acme", "file:///etc/passwd", **env)


@pytest.mark.redis
async def test_a_tenant_s_rate_is_the_queue_s_and_an_answer_has_what_is_left(
    redis_url: str, database: str
) -> None:
    env = {"TOKENMILL_REDIS_URL": redis_url}
    with pytest.raises(ConfigurationError, match="at least 0"):
        keys("limit", "acme", "--rate", "-1", **env)
    with pytest.raises(ConfigurationError, match="name a limit"):
        keys("limit", "acme", **env)
    acme, other = new_key(database, "acme"), new_key(database, "other")
    async with (
        running_worker(redis_url, database),
        running_gateway(redis_url, database, is_open=False) as gateway,
        gateway.client(acme) as client,
        gateway.client(other) as free,
        client_of(redis_url, database) as queue,
    ):
        said = keys("limit", "acme", "--rate", "0.01", "--burst", "2", **env)
        assert said == f"the limits of acme are set in {QUEUE}, every queue that comes"
        unlimited = await free.responses.with_raw_response.create(**LIMITED)
        assert not [name for name in unlimited.headers if name.startswith("x-ratelimit")]
        left = []
        for _ in range(2):
            answer = await client.responses.with_raw_response.create(**LIMITED)
            left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert left == ["1", "0"]
        with pytest.raises(openai.RateLimitError) as refused:
            await client.responses.create(**LIMITED)
        headers = refused.value.response.headers
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert headers["retry-after"] == "100"
        assert int(headers["retry-after-ms"]) <= 100_000
        assert headers["x-request-id"].startswith("req_")
        await queue.set_limits("acme", rate=0)


@pytest.mark.redis
async def test_a_limit_holds_in_a_queue_that_comes_later(redis_url: str, database: str) -> None:
    env = {"TOKENMILL_REDIS_URL": redis_url}
    said = keys("limit", "acme", "--rate", "0.01", "--burst", "2", **env)
    assert said == "the limits of acme are set in every queue that comes"
    async with (
        running_worker(redis_url, database, lease_seconds=30),
        running_gateway(redis_url, database, is_open=False, models={}) as gateway,
        gateway.client(new_key(database, "acme")) as client,
        client_of(redis_url, database) as queue,
    ):

        async def is_listed() -> bool:
            return bool((await client.models.list()).data)

        await until(is_listed)  # once its worker has told its name
        await queue.set_limits("acme", burst=3)  # its own: it stays
        answer = await client.responses.with_raw_response.create(**LIMITED)
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        names = [model.id for model in (await client.models.list()).data]
        assert names == [MODEL]  # and not the queue, which is a name of it too
        assert (await client.models.retrieve(QUEUE)).id == QUEUE


@pytest.mark.redis
async def test_a_key_in_a_query_and_a_model_that_is_not_its_own_are_refused(
    redis_url: str, database: str
) -> None:
    key = new_key(database, "acme", models=["other"])
    async with running_gateway(redis_url, database, is_open=False) as gateway:
        async with gateway.client(key) as client:
            with pytest.raises(openai.PermissionDeniedError) as refused:
                await client.responses.create(**LIMITED)
            assert refused.value.code == "model_not_allowed"
            with pytest.raises(openai.AuthenticationError) as unread:
                await client.models.list(extra_query={"api_key": key})
        assert "not in a query" in str(unread.value)


@pytest.mark.redis
async def test_another_tenant_s_job_is_looked_for_as_an_unknown_one(
    redis_url: str, database: str
) -> None:
    """The commands of both look-ups are counted by the server, and the statements by name."""
    unknown = "01a22303-9cf8-7bcc-a910-a8c23f13e97a"
    async with client_of(redis_url, database) as queue:
        job = await queue.submit(prompt="x", model=MODEL, tenant="mine")
        assert await queue.request(job, "mine") is not None
        calls = []
        for job_id in (str(job), unknown):
            before = await hmgets(queue)
            assert await queue.request(job_id, "theirs") is None
            calls.append(await hmgets(queue) - before)
        assert calls == [1, 1]
        await queue.cancel(job)


async def hmgets(queue: Any) -> int:
    found = await queue._redis.info("commandstats")
    return int(found["cmdstat_hmget"]["calls"])
