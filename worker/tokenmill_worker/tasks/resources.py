"""Holds the objects that the tasks share in a process, each created at its first use: the database,
and what works with it.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Final

import redis
from sqlalchemy import Engine

from tokenmill.sql.engine import open_engine
from tokenmill.transport.connect import SERVER_TROUBLE, Link, connect
from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.keys import Keys
from tokenmill_worker.settings import Settings
from tokenmill_worker.tasks.batches import BatchRuns, OpenBatches, open_batches
from tokenmill_worker.tasks.bulk_files import THREADS, BulkFiles
from tokenmill_worker.tasks.retention import Limits, Retention
from tokenmill_worker.tasks.usage_rollup import RollUp
from tokenmill_worker.tasks.webhooks.delivery import WebhookDelivery
from tokenmill_worker.tasks.webhooks.http_sender import Sender
from tokenmill_worker.tasks.webhooks.outbox import Outbox, OutboxBacklog

WEBHOOK_DAYS: Final = 30.0  # delivered and dead webhooks stay for so long


class QueueTime:
    """Gives the Redis server's time in Unix seconds, which due times are in. While the server is
    away, the time goes on from the last reading.
    """

    def __init__(self, settings: Settings, clock: ServerClock | None = None) -> None:
        self._settings = settings
        self._clock = clock or ServerClock()
        self._client: redis.Redis | None = None
        self._connecting = threading.Lock()

    def __call__(self) -> float:
        settings = self._settings
        try:
            with self._connecting:
                if self._client is None:
                    link = Link(timeout_s=2, connect_timeout_s=2)
                    self._client = connect(settings.redis_url, link)
            key = Keys(settings.queue_name, settings.key_prefix).meta
            return self._clock.refresh(self._client, key) / 1000
        except SERVER_TROUBLE:
            self._clock.keep()
            return self._clock.now_ms() / 1000


class TaskResources:
    """The tasks' shared objects. Safe to use from all threads of a process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.time = QueueTime(settings)

    @cached_property
    def engine(self) -> Engine:
        return open_engine(self.settings.database_url, pool_size=THREADS)

    @cached_property
    def outbox(self) -> Outbox:
        return Outbox(self.engine)

    def backlog(self) -> OutboxBacklog:
        return self.outbox.backlog(round(self.time() * 1000))

    def open_batches(self) -> OpenBatches:
        return open_batches(self.engine)

    @cached_property
    def delivery(self) -> WebhookDelivery:
        settings = self.settings
        return WebhookDelivery(
            self.outbox,
            Sender(allowed=settings.networks),
            settings.webhook_secret,
            clock=self.time,
        )

    @cached_property
    def roll_up(self) -> RollUp:
        return RollUp(self.engine, self.time)

    @cached_property
    def retention(self) -> Retention:
        settings = self.settings
        limits = Limits(
            payload_days=settings.retain_payload_days,
            job_days=settings.retain_job_days,
            usage_days=settings.retain_usage_days,
            webhook_days=WEBHOOK_DAYS,
        )
        return Retention(self.engine, limits, self.roll_up, self.time)

    @cached_property
    def batches(self) -> BatchRuns:
        return BatchRuns(self.settings, self.engine, self.time, self.bulk.thread)

    @cached_property
    def bulk(self) -> BulkFiles:
        return BulkFiles(self.settings)
