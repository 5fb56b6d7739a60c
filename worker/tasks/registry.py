"""Every task by name, the queue it goes through, and how often beat starts it.

A task is one line that asks whoever knows. Sweeps find what is due in SQL and hand single pieces on, so that
many processes share the work; two sweeps at once find different pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from celery import Celery

from worker.settings import Settings
from worker.tasks.desk import Desk
from worker.tasks.outbox import CLAIM_MS, Claim

log = logging.getLogger(__name__)

WEBHOOKS: Final = "webhooks"
UPKEEP: Final = "upkeep"
BULK: Final = "bulk"
RECONCILE_SECONDS: Final = 6 * 3600.0


def schedule(settings: Settings) -> Iterator[tuple[str, float, str]]:
    """Task, seconds, queue."""
    yield "tokenmill.webhooks.sweep", settings.webhook_sweep_seconds, WEBHOOKS
    yield "tokenmill.usage.roll_up", settings.rollup_seconds, UPKEEP
    yield "tokenmill.usage.reconcile", RECONCILE_SECONDS, UPKEEP
    yield "tokenmill.retention.sweep", settings.retention_sweep_seconds, UPKEEP


def register(app: Celery, desk: Desk) -> None:
    _register_webhooks(app, desk)
    _register_upkeep(app, desk)


def _register_webhooks(app: Celery, desk: Desk) -> None:
    def deliver(notice_id: str, until_ms: int) -> None:
        desk.courier.deliver(Claim(notice_id, until_ms))

    def sweep() -> None:
        for claim in desk.courier.claim():
            task.apply_async((claim.id, claim.until_ms), queue=WEBHOOKS, expires=CLAIM_MS / 1000)

    task = app.task(name="tokenmill.webhooks.deliver")(deliver)
    app.task(name="tokenmill.webhooks.sweep")(sweep)


def _register_upkeep(app: Celery, desk: Desk) -> None:
    def roll_up() -> None:
        desk.roll_up.recent()

    def reconcile() -> None:
        days = desk.roll_up.reconcile()
        if days:
            log.info("summed up again: %s", ", ".join(days))

    def remove_old() -> None:
        removed = desk.retention.run()
        if removed:
            log.info("removed: %s", removed)

    app.task(name="tokenmill.usage.roll_up")(roll_up)
    app.task(name="tokenmill.usage.reconcile")(reconcile)
    app.task(name="tokenmill.retention.sweep")(remove_old)
