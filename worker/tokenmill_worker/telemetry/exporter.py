"""`tokenmill exporter`: serves the /metrics of queues when no worker runs. It reads only Redis.

One exporter is enough for any number of queues. It needs no model, no database, and only the rights
of the `reader`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from tokenmill import AsyncClient
from tokenmill.transport.connect import connect_async
from tokenmill_worker.queue.server_check import ServerWatch
from tokenmill_worker.telemetry import Check, HealthServer
from tokenmill_worker.telemetry.instruments import CallbackCollector
from tokenmill_worker.telemetry.queue_metrics import INTERVAL_S, QueueMetrics, queue_samples

log = logging.getLogger(__name__)


class Exporter:
    """Serves from `start` to `stop`; port 0 means any free port."""

    def __init__(
        self,
        redis_url: str,
        queues: Sequence[str],
        prefix: str,
        host: str,
        port: int,
        every_s: float = INTERVAL_S,
    ) -> None:
        self._clients = [AsyncClient(redis_url, queue=queue, prefix=prefix) for queue in queues]
        self._redis = connect_async(redis_url)
        self._queues = [
            QueueMetrics(client, every_s, server=ServerWatch(self._redis, client.keys.meta))
            for client in self._clients
        ]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(CallbackCollector(lambda: queue_samples(self._queues)))
        checks = [Check(f"queue {queue.queue}", queue.problem) for queue in self._queues]
        self._server = HealthServer(host, port, registry, checks)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        """Start serving and reading. Raises PortTaken."""
        await self._server.start()
        self._tasks = [asyncio.create_task(queue.run()) for queue in self._queues]
        self._tasks += [
            asyncio.create_task(queue.server.run()) for queue in self._queues if queue.server
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop()
        for client in self._clients:
            await client.close()
        await self._redis.aclose()

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises ConfigurationError if Redis refuses the first read
        of a queue.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, stop.set)
        await self.start()
        log.info(
            "Metrics of the queues %s are served on port %d",
            ", ".join(queue.queue for queue in self._queues),
            self.port,
        )
        asked = asyncio.create_task(stop.wait())
        ended, _ = await asyncio.wait([asked, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        await self.stop()
        for task in ended - {asked}:
            task.result()
