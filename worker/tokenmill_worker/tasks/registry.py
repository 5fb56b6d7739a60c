"""Registers every task by name, with its queue and how often beat starts it.

A task is one call of the object that does the work. Sweeps find due work in SQL and start one task
for each piece, so that many processes share the work. Two sweeps at once find different pieces.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from celery import Celery

from tokenmill.errors import QueueUnavailable, TokenmillError
from tokenmill.transport.backoff import Backoff
from tokenmill_worker.tasks.batches import LEASE_MS as BATCH_LEASE_MS
from tokenmill_worker.tasks.batches import BatchLease
from tokenmill_worker.tasks.bulk_files import ImportRequest, Reschedule
from tokenmill_worker.tasks.resources import TaskResources
from tokenmill_worker.tasks.webhooks.outbox import LEASE_MS, OutboxLease

log = logging.getLogger(__name__)

WEBHOOKS: Final = "webhooks"
UPKEEP: Final = "upkeep"
BULK: Final = "bulk"
# pauses between two checks of an unfinished batch
FETCH_BACKOFF: Final = Backoff(first_s=1.0, longest_s=30.0, spread=(1.0, 1.0))
# each periodic task as (task, seconds between two runs, queue)
SCHEDULE: Final = (
    ("tokenmill.webhooks.sweep", 2.0, WEBHOOKS),
    ("tokenmill.usage.roll_up", 300.0, UPKEEP),
    ("tokenmill.usage.reconcile", 6 * 3600.0, UPKEEP),
    ("tokenmill.retention.sweep", 600.0, UPKEEP),
)
# those of the gateway's files, where they are kept
FILES_SCHEDULE: Final = (
    ("tokenmill.batches.sweep", 1.0, BULK),
    ("tokenmill.files.sweep", 60.0, UPKEEP),
)


def register(app: Celery, resources: TaskResources) -> None:
    """Register all tasks. They are not shared with other Celery applications in the process."""
    _register_webhooks(app, resources)
    _register_upkeep(app, resources)
    _register_bulk(app, resources)
    if resources.settings.files:
        _register_files(app, resources)


def _register_webhooks(app: Celery, resources: TaskResources) -> None:
    def deliver(message_id: str, until_ms: int) -> str:
        return resources.delivery.deliver(OutboxLease(message_id, until_ms))

    def sweep() -> None:
        for lease in resources.delivery.claim():
            task.apply_async((lease.id, lease.until_ms), queue=WEBHOOKS, expires=LEASE_MS / 1000)

    task = app.task(name="tokenmill.webhooks.deliver", shared=False)(deliver)
    app.task(name="tokenmill.webhooks.sweep", shared=False)(sweep)


def _register_upkeep(app: Celery, resources: TaskResources) -> None:
    def roll_up() -> None:
        resources.roll_up.recent()

    def reconcile() -> None:
        days = resources.roll_up.reconcile()
        if days:
            log.info("Summed the usage of %s again", ", ".join(days))

    def remove_old() -> None:
        removed = resources.retention.run()
        if removed:
            log.info("Removed old rows: %s", removed)

    app.task(name="tokenmill.usage.roll_up", shared=False)(roll_up)
    app.task(name="tokenmill.usage.reconcile", shared=False)(reconcile)
    app.task(name="tokenmill.retention.sweep", shared=False)(remove_old)


def _register_files(app: Celery, resources: TaskResources) -> None:
    """Register the tasks of the gateway's files and batches. A task that is lost is found again by
    a sweep, when its lease has ended.
    """

    def run(batch_id: str, queue: str, until_ms: int) -> None:
        try:
            resources.batches.run(BatchLease(batch_id, queue, until_ms))
        except TokenmillError as error:
            log.error("Batch %s waits: %s", batch_id, error)
            raise

    def sweep() -> None:
        for lease in resources.batches.claim():
            terms = (lease.batch_id, lease.queue, lease.until_ms)
            task.apply_async(terms, queue=BULK, expires=BATCH_LEASE_MS / 1000)

    def remove() -> None:
        if removed := resources.batches.remove_files():
            log.info("Removed %d files", removed)

    task = app.task(name="tokenmill.batches.run", shared=False, throws=(TokenmillError,))(run)
    app.task(name="tokenmill.batches.sweep", shared=False)(sweep)
    app.task(name="tokenmill.files.sweep", shared=False)(remove)


def _register_bulk(app: Celery, resources: TaskResources) -> None:
    """Register the bulk tasks. A task is acknowledged at its end: if its process dies, it runs
    again and goes on where it stopped. A wrong request is logged in one sentence without a
    traceback.
    """
    options: dict[str, Any] = {
        "bind": True,
        "acks_late": True,
        "max_retries": None,
        "throws": (TokenmillError,),
    }

    def export_file(task: Any, batch_id: str, queue: str, output: str, errors: str | None) -> None:
        try:
            resources.bulk.export_file(batch_id, queue, output, errors)
        except (Reschedule, QueueUnavailable) as error:
            pause_s = FETCH_BACKOFF.delay_s(task.request.retries + 1)
            raise task.retry(countdown=pause_s, exc=error, throw=False) from None
        except TokenmillError as error:
            log.error("Batch %s was not exported: %s", batch_id, error)
            raise

    exporting = app.task(name="tokenmill.bulk.export", shared=False, **options)(export_file)

    def import_file(
        task: Any,
        source: str,
        output: str | None = None,
        errors: str | None = None,
        queue: str = "",
        **terms: Any,
    ) -> None:
        batch_id = f"batch_{task.request.id}"
        try:
            resources.bulk.import_file(
                ImportRequest.of(batch_id, source=source, queue=queue, **terms)
            )
        except (Reschedule, QueueUnavailable) as error:
            raise task.retry(
                countdown=getattr(error, "pause_s", 1), exc=error, throw=False
            ) from None
        except TokenmillError as error:
            log.error("Batch %s was not imported: %s", batch_id, error)
            raise
        if output is not None:
            exporting.apply_async(
                (batch_id, queue, output, errors), queue=BULK, task_id=f"{task.request.id}-export"
            )

    app.task(name="tokenmill.bulk.import", shared=False, **options)(import_file)
