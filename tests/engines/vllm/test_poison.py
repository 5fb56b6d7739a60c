"""A request that kills vLLM's engine core whenever it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.checker import Received
from tests.chaos.clients import listen
from tests.engines.vllm import deadly_token
from tests.engines.vllm.service import START_S, Service
from tests.support.vllm import needs_vllm
from tests.support.waiting import until
from tests.support.worker import client_of
from tokenmill_schemas.result import JobStatus

pytestmark = [
    pytest.mark.redis, pytest.mark.slow, pytest.mark.chaos, pytest.mark.model,
    pytest.mark.timeout(3_000), needs_vllm,
]  # fmt: skip
COUNT = 150  # tokens of the other answers


async def test_a_request_that_kills_each_engine_core_is_set_aside_and_the_others_end(
    make_service: Callable[..., Service],
) -> None:
    service = make_service(f"{deadly_token.__name__}:install", max_crashes=1)
    worker = service.start()
    await asyncio.to_thread(service.engine)
    asked: list[dict[str, Any]] = [
        {"prompt": f"The rivers of {place} are", "max_tokens": COUNT, "temperature": 0.0,
         "ignore_eos": True}
        for place in ("Europe", "Asia", "Africa")
    ]  # fmt: skip
    async with client_of(service.url, service.database) as client:
        calm = [await client.result(await client.submit(**job), timeout=START_S) for job in asked]
        received = [Received() for _ in asked]
        async with asyncio.TaskGroup() as listening:
            jobs = [await client.submit(**job) for job in asked]
            for job, one in zip(jobs, received, strict=True):
                listening.create_task(listen(client, job, one))
            await until(lambda: all(one.num_tokens for one in received), timeout_s=60)
            assert not any(one.ended for one in received)
            poison = await client.submit(prompt=f"He died of{deadly_token.WORD}", max_tokens=5)
            dead = await client.result(poison, timeout=4 * START_S)  # of several engines
        after = await client.result(await client.submit(**asked[0]), timeout=START_S)
    deaths = worker.words.count("Engine died; a new one starts: vLLM's engine core has died")
    print(f"{deaths} engine cores died of it; {dead.error}", flush=True)  # noqa: T201
    assert dead.status is JobStatus.DEAD
    assert deaths >= 2
    assert [one.problems for one in received] == [[]] * len(asked)
    assert [one.status for one in received] == ["succeeded"] * len(asked)
    assert [tuple(one.token_ids) for one in received] == [one.token_ids for one in calm]
    assert after.token_ids == calm[0].token_ids
    assert worker.is_alive
