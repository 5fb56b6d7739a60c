"""Our whole service as a measured engine: Valkey, a worker and its engine, SQLite, and subscribers.

The engine is ours, or vLLM where the option `python` names the Python of its environment. A round
includes SQL's commit. Each round is a tenant of its own.
"""

import asyncio
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.workloads import WorkloadRequest
from ops.benchmarks.peers.service import INNER, MeasuredService, Passage, ReceivedTokens
from ops.benchmarks.peers.stamped_worker import NOTED_SEED
from tokenmill import AsyncClient
from tokenmill_worker.engines import kind_for, kind_named
from tokenmill_worker.record import migrate
from tokenmill_worker.settings import child_environment, load_settings

QUEUE = "bench"
VLLM_LENGTH = 2048  # of a prompt and its answer


class WholeWay(MeasuredService):
    noted_one_in = 8  # noting all jobs would cost half a percent of the tokens

    def __init__(self, options: EngineOptions) -> None:
        super().__init__()
        self._notes = self.folder / "notes"
        self._notes.touch()
        url, database = f"unix://{self.socket}", f"sqlite:///{self.folder / 'results.db'}"
        migrate.upgrade(database)
        given, direct = settings_of(options)
        service = {"redis_url": url, "database_url": database, "queue": QUEUE}
        settings = load_settings(service | given)
        # lives longer than a job, as a web backend's client does
        self._client = AsyncClient(url, queue=QUEUE, database=database)
        self._undo.callback(lambda: self.loop.run(self._client.close()))
        worker = "ops.benchmarks.peers.stamped_worker"
        command = [sys.executable, "-m", worker, str(self._notes), json.dumps(direct)]
        self.start({"worker": command}, child_environment(settings))
        is_vllm = settings.engine_kind == "vllm"
        self.parts = ["worker", *list(INNER)[: 2 if is_vllm else 1]]
        gc.collect()
        gc.freeze()  # garbage collection skips the benchmark's own objects from here on
        engine = "vLLM" if is_vllm else "our engine"
        self.description = f"Valkey (append-only), worker, {engine}, SQLite, a subscriber per job"

    async def is_ready(self) -> bool:
        return any(status.model for status in await self._client.workers())

    async def serve(
        self, requests: Sequence[WorkloadRequest], received: Sequence[ReceivedTokens], tenant: str
    ) -> None:
        self._offset = self._notes.stat().st_size
        jobs = await self._client.submit_many(
            {
                "prompt_ids": request.prompt, "max_tokens": request.max_tokens, "tenant": tenant,
                "temperature": 0.0, "ignore_eos": True,
                "seed": None if each.times is None else NOTED_SEED,
            }
            for request, each in zip(requests, received, strict=True)
        )  # fmt: skip
        for job, each in zip(jobs, received, strict=True):
            each.job = str(job)
        await asyncio.gather(*map(self._subscribe, received))

    async def _subscribe(self, received: ReceivedTokens) -> None:
        async for chunk in self._client.stream(received.job):
            if chunk.token_ids:
                received.take(chunk.index, chunk.token_ids)
            if chunk.error is not None:
                raise RuntimeError(f"a job failed: {chunk.error.message}")

    def latencies(self, received: Sequence[ReceivedTokens]) -> list[float]:
        noted = {each.job: each.times for each in received if each.times is not None}
        return latencies(self._notes.read_text(encoding="ascii")[self._offset :], noted)


def settings_of(options: EngineOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a worker, and the values of EngineConfig that are no settings."""
    if python := options.settings.get("python"):
        return {
            "engine": "vllm", "engine_python": python, "engine_arg": "enforce-eager=true",
            "model": options.model, "dtype": options.dtype, "max_model_len": VLLM_LENGTH,
            "max_num_seqs": options.max_sequences,
            "max_num_batched_tokens": options.max_batch_tokens,
        }, {}  # fmt: skip
    given, known = options.engine_settings(), kind_named(kind_for(options.model)).settings
    direct = {name: given.pop(name) for name in list(given) if name not in known}
    return given, direct


def latencies(notes: str, received: Mapping[str, Passage]) -> list[float]:
    """Return the seconds of each noted chunk, from its step's end to its subscriber.

    Of a stamped worker's lines about the same token the first counts: a token that is given again
    was late before.
    """
    step_ends: dict[tuple[str, int], float] = {}
    for line in notes.splitlines():
        end, job, count = line.split(" ")
        step_ends.setdefault((job, int(count)), float(end))
    return [
        when - step_ends[job, count]
        for job, passage in received.items()
        for count, when in passage.items()
        if (job, count) in step_ends
    ]
