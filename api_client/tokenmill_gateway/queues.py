"""Finds the queue of a model, and the queue of a job."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from uuid import UUID

from tokenmill.async_client import AsyncClient
from tokenmill.operations.io_requests import ClientOptions
from tokenmill.sql import SqlResults
from tokenmill.transport.connect import connect, connect_async
from tokenmill.transport.refusals import TRANSLATED, translate
from tokenmill_gateway.keys import ApiKey
from tokenmill_gateway.rates import Rates
from tokenmill_gateway.refusals import HttpRefusal
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.keys import queue_of, tenant_limits
from tokenmill_schemas.result import Usage
from tokenmill_schemas.validation import MAX_NAME_CHARS

PREFIXES: Final = ("resp_", "chatcmpl-", "cmpl-")
LISTED_S: Final = 10.0  # the server's queues are listed anew after so long
_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


class Queues:
    """The clients of all queues. They share the connections to one server.

    `models` names the queue of each model; empty: a model's queue has its name.
    """

    def __init__(
        self,
        url: str,
        models: Mapping[str, str],
        *,
        database: str,
        prefix: str,
        options: ClientOptions,
    ) -> None:
        self._url = url
        self._results = SqlResults(database)
        self._models = dict(models)
        self._prefix = prefix
        self._options = options
        self._redis = connect_async(url, options.link)
        self.rates = Rates(self._redis, prefix)
        self._clients: dict[str, AsyncClient] = {}
        self._listed_s = -LISTED_S
        for queue in self._models.values():
            self._client(queue)

    def _client(self, queue: str) -> AsyncClient:
        client = self._clients.get(queue)
        if client is None:
            client = self._clients[queue] = AsyncClient(
                self._url,
                queue=queue,
                database=self._results,
                prefix=self._prefix,
                options=self._options,
                redis_client=self._redis,
            )
        return client

    async def _all(self) -> list[AsyncClient]:
        """Return the clients of all queues: those that were named, or all of the server's."""
        now = time.monotonic()
        if not self._models and now - self._listed_s >= LISTED_S:
            with _translated():
                pattern = _metas(self._prefix)
                async for key in self._redis.scan_iter(match=pattern, count=1_000):
                    self._client(_queue_in(key, self._prefix))
            self._listed_s = now
        return list(self._clients.values())

    async def of_model(self, model: object, key: ApiKey) -> AsyncClient:
        """Return the client of the queue that serves a model, in which the key's tenant has its
        limits. Raises HttpRefusal.
        """
        client = await self._of_model(model, key)
        with _translated():
            await self.rates.apply(client.queue, key.tenant)
        return client

    async def _of_model(self, model: object, key: ApiKey) -> AsyncClient:
        if not isinstance(model, str) or not model:
            code = "missing_required_parameter"
            raise HttpRefusal.of(400, code, "you must provide a model parameter", "model")
        if len(model) > MAX_NAME_CHARS:
            raise unknown_model(model)
        if not key.may_use(model):  # whether or not there is one
            words = f"this API key may not use the model {model!r}"
            raise HttpRefusal.of(403, "model_not_allowed", words, "model")
        if self._models:
            queue = self._models.get(model)
            if queue is None:
                raise unknown_model(model)
            return self._client(queue)
        clients = await self._all()
        if (queue := queue_of(model)) in self._clients:
            return self._client(queue)
        for client in clients:  # an alias, or an adapter
            if model in {name for worker in await client.workers() for name in _names(worker)}:
                return client
        raise unknown_model(model)

    async def models(self, key: ApiKey, *, with_queues: bool = False) -> dict[str, int | None]:
        """Return the names that a key may use, each with its model's length in tokens, as far as a
        worker of it lives. `with_queues`: also the names of queues whose model has one of its own.
        """
        found: dict[str, int | None] = dict.fromkeys(self._models)
        clients = await self._all()
        all_workers = await asyncio.gather(*(client.workers() for client in clients))
        for client, workers in zip(clients, all_workers, strict=True):
            for worker in workers:
                hidden = () if self._models or with_queues else _second_name(worker, client.queue)
                for name in _names(worker):
                    if name in hidden:
                        continue
                    if not self._models or name in self._models:
                        found[name] = worker.max_model_len or None
        return {name: found[name] for name in found if key.may_use(name)}

    async def live(self, job_id: str, tenant: str) -> tuple[AsyncClient, JobRequest] | None:
        """Return the request of a tenant's job that has not ended, with the client of its queue."""
        clients = await self._all()
        with _translated():
            async with self._redis.pipeline(transaction=False) as pipeline:
                for client in clients:
                    pipeline.hmget(client.keys.job(job_id), "tenant")
                owners = await pipeline.execute() if clients else []
        for client, (owner,) in zip(clients, owners, strict=True):
            if owner == tenant.encode():
                request = await client.request(job_id)
                return None if request is None else (client, request)
        return None

    def of_queue(self, queue: str) -> AsyncClient:
        return self._client(queue)

    async def ping(self) -> None:
        with _translated():
            await self._redis.ping()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        await self._redis.aclose()
        self._results.close()


def limit_everywhere(
    url: str, prefix: str, tenant: str, limits: Mapping[str, float | None]
) -> list[str]:
    """Record a tenant's limits for the queues that come, and return the names of those that are
    there. Raises QueueUnavailable.
    """
    with connect(url) as server, _translated():
        given = {f"{name}:{tenant}": value for name, value in limits.items() if value is not None}
        server.hset(tenant_limits(prefix), mapping=given)
        keys = server.scan_iter(match=_metas(prefix), count=1_000)
        return sorted(_queue_in(key, prefix) for key in keys)


def _metas(prefix: str) -> str:
    """Return the pattern of the keys of which each queue has one."""
    return f"{prefix}{{*}}:meta"


def _queue_in(key: bytes, prefix: str) -> str:
    return key.decode(errors="replace")[len(prefix) + 1 : -len("}:meta")]


def _names(worker: WorkerStatus) -> tuple[str, ...]:
    """Return the names of models that a worker serves."""
    names = (worker.model, *worker.aliases, *worker.adapters)
    return tuple(name for name in names if name)  # a worker that starts has none yet


def _second_name(worker: WorkerStatus, queue: str) -> tuple[str, ...]:
    """Return the name beside the one that a model is listed by: its queue's, which is a name too,
    or its folder's.
    """
    if worker.aliases.get(queue) != worker.model:
        return ()
    return (worker.model if worker.model.startswith(("/", ".", "~")) else queue,)


@contextmanager
def _translated() -> Iterator[None]:
    """Raise the client's errors for the server's."""
    try:
        yield
    except TRANSLATED as error:
        raise translate(error) from error


def unknown_model(model: str) -> HttpRefusal:
    words = f"there is no model {model[:255]!r} here"
    return HttpRefusal.of(404, "model_not_found", words, "model")


def job_id_of(shown: str, prefix: str) -> str:
    """Return the id of the job behind an id that the API shows. Raises HttpRefusal."""
    job_id = shown.removeprefix(prefix)
    if not shown.startswith(prefix) or _ID.fullmatch(job_id) is None:
        raise not_found(shown)
    return job_id


def not_found(shown: str) -> HttpRefusal:
    return HttpRefusal.of(404, "not_found", f"there is no {shown[:64]!r} here")


def created_at(job_id: str) -> int:
    """Return the time of creation in Unix seconds, which the id has. So every gateway tells the
    same one.
    """
    return (UUID(job_id).int >> 80) // 1000


def completed_at(job_id: str, usage: Usage | None) -> int:
    """Return the time of the end in Unix seconds, the same in a stream and in a stored answer."""
    return ((UUID(job_id).int >> 80) + (usage.total_ms if usage else 0)) // 1000
