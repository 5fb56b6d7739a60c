"""A tenant's usage by day, through OpenAI's own client."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import openai
import pytest

from tests.gateway.conftest import new_key, running_gateway
from tests.record.support import finished
from tokenmill_worker.record import ResultStore

pytestmark = pytest.mark.redis
DAY = 86_400
FIRST = round(datetime(2026, 3, 1, tzinfo=UTC).timestamp())


@pytest.fixture
async def recorded(database: str) -> str:
    """A database with jobs of two tenants, of two models, on the first and the third of March."""
    store = ResultStore(database, queue="q")
    ends = [(FIRST, "m1"), (FIRST + DAY - 1, "m2"), (FIRST + 2 * DAY, "m1")]
    jobs = [
        finished(f"{tenant}-{n}", tenant=tenant, model=model, finished_ms=second * 1000)
        for tenant in ("acme", "other")
        for n, (second, model) in enumerate(ends)
    ]
    await store.record(jobs)
    await store.close()
    return database


async def test_usage_is_the_tenant_s_own_in_buckets_of_a_day(redis_url: str, recorded: str) -> None:
    key = new_key(recorded, "acme")
    async with (
        running_gateway(redis_url, recorded, is_open=False) as gateway,
        gateway.client(key) as client,
    ):
        usage = client.with_options(admin_api_key=key).admin.organization.usage
        ask: dict[str, Any] = {"start_time": FIRST + 5, "end_time": FIRST + 3 * DAY}
        whole = await usage.completions(**ask)
        one = finished("x").result.usage
        assert [bucket.start_time for bucket in whole.data] == [FIRST + n * DAY for n in range(3)]
        assert [[r.num_model_requests for r in bucket.results] for bucket in whole.data] == [
            [2], [], [1],
        ]  # fmt: skip
        first = whole.data[0].results[0]
        tokens = (first.input_tokens, first.output_tokens, first.input_cached_tokens, first.model)
        expected = (2 * one.prompt_tokens, 2 * one.completion_tokens, 2 * one.cached_tokens, None)
        assert tokens == expected
        by_model = await usage.completions(**ask, group_by=["model"], models=["m1"])
        found = [[r.model for r in bucket.results] for bucket in by_model.data]
        assert found == [["m1"], [], ["m1"]]
        page = await usage.completions(**ask, limit=2)
        assert (len(page.data), page.has_more) == (2, True)
        rest = await usage.completions(**ask, limit=2, page=page.next_page)
        assert (rest.data, rest.has_more) == (whole.data[2:], False)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "start_time"),
    ({"start_time": -1}, "start_time"),
    ({"start_time": FIRST, "limit": 32}, "limit"),
    ({"start_time": FIRST, "bucket_width": "1h"}, "bucket_width"),
    ({"start_time": FIRST, "group_by[]": "user_id"}, "group_by"),
    ({"start_time": FIRST, "project_ids[]": "p"}, "project_ids[]"),
    ({"start_time": FIRST, "page": "x"}, "page"),
    ({"start_time": FIRST, "end_time": 10**18}, "end_time"),
]


async def test_a_wrong_query_is_refused_by_name(redis_url: str, database: str) -> None:
    async with (
        running_gateway(redis_url, database) as gateway,
        gateway.client() as client,
    ):
        for query, name in WRONG:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.get(
                    "/organization/usage/completions", cast_to=object, options={"params": query}
                )
            assert (query, refused.value.param) == (query, name)
