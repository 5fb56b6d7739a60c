"""`tokenmill tasks`: one process with Celery's worker on threads and its beat. SIGTERM lets running tasks finish."""

from __future__ import annotations

import asyncio
import logging

from celery.beat import EmbeddedService

from worker.record.store import ResultStore
from worker.settings import Settings
from worker.tasks.app import QUEUES, build_app
from worker.telemetry import configure_logging

log = logging.getLogger(__name__)


def run(settings: Settings) -> int:
    """Serve until a signal. Raises SettingsError, SchemaOutdated, StoreUnavailable."""
    configure_logging(settings.log_level, settings.log_format, with_private=settings.log_prompts)
    if settings.log_level != "debug":  # a line for each sweep would bury the rest
        logging.getLogger("celery").setLevel(logging.WARNING)
    app = build_app(settings)
    asyncio.run(_check(settings))
    if not settings.webhook_secret:
        log.warning("no webhook is sent: TOKENMILL_WEBHOOK_SECRET is not set; `tokenmill webhooks secret --new`")
    worker = app.Worker(
        pool="threads",
        concurrency=settings.tasks_threads,
        queues=list(QUEUES),
        without_mingle=True,
        without_gossip=True,
        without_heartbeat=True,
        loglevel=settings.log_level.upper(),
        quiet=True,
    )
    log.info("tasks: %d threads, queues %s", settings.tasks_threads, ", ".join(QUEUES))
    # On a thread: Celery's own process for it would outlive a killed parent. The default scheduler pickles.
    beat = EmbeddedService(app, thread=True, scheduler_cls=app.conf.beat_scheduler)
    beat.start()
    try:
        worker.start()
    finally:
        beat.stop()
    return int(worker.exitcode or 0)


async def _check(settings: Settings) -> None:
    store = ResultStore(settings.database_url)
    await store.check()
    await store.close()
