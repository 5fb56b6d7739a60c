"""A worker with vLLM and one with our engine on one queue, and kills of both."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from tests.chaos.checker import Received, Wanted, violations
from tests.chaos.clients import listen
from tests.engines.vllm.parts import CORE, part_of
from tests.engines.vllm.schemas import SCHEMAS
from tests.engines.vllm.service import OWN, START_S, Service
from tests.support import tiny_llama
from tests.support.vllm import needs_vllm
from tests.support.waiting import until
from tests.support.worker import client_of
from tokenmill import AsyncClient
from tokenmill_schemas.result import JobResult

pytestmark = [
    pytest.mark.redis, pytest.mark.slow, pytest.mark.chaos, pytest.mark.model,
    pytest.mark.timeout(30_000), needs_vllm,
]  # fmt: skip
# where a worker dies, or its engine
FAULTS: dict[str, tuple[str, Callable[[psutil.Process, psutil.Process], psutil.Process]]] = {
    "the engine core of vLLM": ("vllm", lambda _, engine: part_of(engine, CORE)),
    "our worker": ("own", lambda worker, _: worker),
    "the worker with vLLM": ("vllm", lambda worker, _: worker),
    "our engine": ("own", lambda _, engine: engine),
}


def asked() -> list[dict[str, Any]]:
    """Return greedy jobs, which both engines answer alike: half of them of a JSON schema. The tiny
    model would draw marks of thoughts and calls.
    """
    places = ("Europe", "Asia", "Africa", "America")
    plain = [
        {"messages": [{"role": "user", "content": f"Tell me of the rivers of {place}."}],
         "max_tokens": 120, "ignore_eos": True}
        for place in places
    ]  # fmt: skip
    bound = [
        {"messages": [{"role": "user", "content": f"Give me {name}."}],
         "response_format": {"json_schema": SCHEMAS[name]}, "max_tokens": 300}
        for name in ("a person", "a long text", "an address", "nested objects")
    ]  # fmt: skip
    same = {"temperature": 0.0, "suppress_tokens": list(tiny_llama.MARK_IDS)}
    return [{**job, **same} for pair in zip(plain, bound, strict=True) for job in pair]


async def undisturbed(client: AsyncClient) -> list[JobResult]:
    jobs = [await client.submit(**job) for job in asked()]
    found = [await client.result(job, timeout=START_S) for job in jobs]
    for job, result in zip(asked(), found, strict=True):
        if "response_format" in job:
            jsonschema.validate(json.loads(result.text), job["response_format"]["json_schema"])
    return found


async def test_no_job_is_lost_or_repeated_between_engines_of_two_kinds_that_are_killed(
    make_service: Callable[..., Service], rounds: int, soak_jobs: int, tmp_path: Path
) -> None:
    """Four kills, each in the middle of two batches; `--rounds` 3 N: N times these.

    `--soak-jobs` N: as many jobs, shared out to the kills, on a tiny model. `--rounds 15
    --soak-jobs 10000` is the long form.
    """
    faults = [*FAULTS.items()] * max(1, rounds // 3)
    batches = max(2, math.ceil(soak_jobs / len(faults) / len(asked())))
    places = 16 if soak_jobs else 4
    shared: dict[str, object] = {"max_num_seqs": places}
    if soak_jobs:
        shared["model"] = tiny_llama.save(tmp_path / "model", head_size=32)
    vllm = make_service(**shared)
    services = {"vllm": vllm, "own": make_service(beside=vllm, **shared)}
    settings: dict[str, dict[str, object]] = {"vllm": {}, "own": OWN}
    received: dict[str, list[Received]] = {}
    killed: Counter[str] = Counter()

    async def all_ready() -> None:
        for kind, service in services.items():
            service.start(**settings[kind])
        for service in services.values():
            await asyncio.to_thread(service.engine, max(1, service.num_engines))

    async with client_of(vllm.url, vllm.database) as client:
        services["own"].start(**OWN)
        await asyncio.to_thread(services["own"].engine)  # a job of a queue without workers fails
        results = await undisturbed(client)
        calm = [Wanted.of(result) for result in results]
        vllm.wanted |= zip((result.job_id for result in results), calm, strict=True)
        async with asyncio.TaskGroup() as listening:
            for what, (kind, victim) in faults:
                await all_ready()
                begun = []
                for job, wanted in [*zip(asked(), calm, strict=True)] * batches:
                    name, one = await client.submit(**job), Received()
                    vllm.wanted[name], received[name] = wanted, [one]
                    listening.create_task(listen(client, name, one))
                    begun.append(one)
                await until(partial(are_in_the_middle, begun, places), timeout_s=START_S)
                service = services[kind]
                assert service.worker is not None
                before = service.num_engines
                worker = psutil.Process(service.worker.process.pid)
                part = victim(worker, service.engine(before))
                part.send_signal(signal.SIGKILL)
                killed[what] += 1
                ended = sum(one.ended for (one,) in received.values())
                print(f"{clock()} {ended} of {len(received)}; kills {what}", flush=True)  # noqa: T201
                if part == worker:
                    service.worker.process.wait()
                else:
                    await asyncio.to_thread(service.engine, before + 1)
            await all_ready()
        served = Counter([(await client.result(job)).worker_id for job in received])
    found = violations(vllm.database, vllm.wanted, received)
    print(  # noqa: T201
        f"{len(received)} jobs, ended by {dict(served)}; killed: {dict(killed)}; "
        f"{len(found)} violations",
        flush=True,
    )
    assert found == []


def are_in_the_middle(jobs: list[Received], places: int) -> bool:
    """Return whether both workers are in the middle of answers: each has so many places."""
    return sum(bool(one.num_tokens) and not one.ended for one in jobs) > places


def clock() -> str:
    return time.strftime("%H:%M:%S")
