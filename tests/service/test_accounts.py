"""Whatever happens to a worker's jobs, none that has left it takes a place that others need."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.publish.support import event
from tests.service.test_jobs import Bench, delivery, running
from tests.service.test_preparation import long
from tokenmill.transport.backoff import Backoff
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.job import Priority
from tokenmill_worker import supervisor
from tokenmill_worker.jobs import Delivery
from tokenmill_worker.service import early_ends

EVENTS = (
    "claim", "claim", "claim", "claim again", "cancel", "lose", "lose all", "end", "end", "fail",
    "kill", "queue", "queue", "step",
)  # fmt: skip


class Life:
    """One worker's jobs, and what happens to them by chance."""

    def __init__(self, bench: Bench, chance: random.Random) -> None:
        self.bench, self.service, self.chance = bench, bench.service, chance
        self.claimed: dict[str, Delivery] = {}

    async def happen(self, what: str) -> None:
        service, ends, orders = self.service, self.service.ends, self.bench.orders
        owned = [one.job_id for one in service._owned]
        some = [job for job in owned if self.chance.random() < 0.4]
        match what:
            case "claim" if service.credits():
                await self.claim([f"j{len(self.claimed) + n}" for n in range(1 + len(some))])
            case "claim again" if some and service.credits():
                await self.claim(some)
            case "cancel":
                ends.cancel_all(some)
            case "lose":
                ends.drop_lost(some)
            case "lose all":
                ends.drop_all()
            case "end" | "fail":
                await self.finish(
                    some, FinishReason.LENGTH if what == "end" else FinishReason.ERROR
                )
            case "kill":
                self.bench.host.die()
            case "queue":
                orders.is_down = not orders.is_down
            case "step":
                self.bench.host.send()
        await asyncio.sleep(self.chance.choice([0, 0.001]))

    async def claim(self, jobs: list[str]) -> None:
        deliveries = []
        for job in jobs:
            last = self.claimed.get(job)
            fields: dict[str, Any] = {
                "token": 1 if last is None else last.token + 1,
                "crashes": self.chance.choice([0, 0, 0, 1, 2]),
                "alone": self.chance.random() < 0.1,
                "outcome": self.chance.choice(["run", "run", "run", "cancelled", "dead"]),
            }
            urgent = self.chance.choice([Priority.INTERACTIVE, Priority.STANDARD])
            is_long = self.chance.random() < 0.3
            made = long(job, urgent, **fields) if is_long else delivery(job, **fields)
            self.claimed[job] = made
            deliveries.append(made)
        await self.service.take(deliveries)

    async def finish(self, jobs: list[str], reason: FinishReason) -> None:
        code: dict[str, Any] = (
            {"error": "boom", "error_code": "engine_error"} if reason == "error" else {}
        )
        in_engine = self.service._owned.in_engine
        ends = [
            event("x", one.job_id, end=reason, token=one.token, **code)
            for one in self.service._owned
            if one.job_id in jobs and one.request_id in in_engine
        ]
        self.bench.host.send(*ends)
        await asyncio.sleep(0)

    async def end(self) -> None:
        """Let every job end or leave that still can."""
        self.bench.orders.is_down = False
        for _ in range(200):
            await asyncio.sleep(0.005)
            if not len(self.service._owned) and self.service.health.engine_ready:
                return
            await self.finish([one.job_id for one in self.service._owned], FinishReason.LENGTH)


@settings(max_examples=80)
@given(what=st.lists(st.sampled_from(EVENTS), max_size=25), seed=st.integers(0, 1 << 32))
def test_a_worker_whose_jobs_have_left_has_all_its_credits(what: list[str], seed: int) -> None:
    async def live() -> None:
        async with running(Bench()) as bench:
            before = bench.service.credits()
            life = Life(bench, random.Random(seed))
            for one in what:
                await life.happen(one)
            await life.end()
            owned = bench.service._owned
            left = owned.preparing, owned.in_engine, owned.urgent, owned.cancelled
            assert [len(owned), *map(len, left)] == [0, 0, 0, 0, 0]
            quarantine = bench.service._quarantine
            assert (len(quarantine), quarantine._running) == (0, {})
            assert bench.service.credits() == before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early_ends, "RELEASE_RETRY_S", 0.001)
        patch.setattr(supervisor, "RESTART_BACKOFF", Backoff(first_s=0.001, longest_s=0.001))
        asyncio.run(live())
