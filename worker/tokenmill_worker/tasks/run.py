"""Runs `tokenmill tasks`: one process with Celery's worker on threads, and its beat. SIGTERM lets
running tasks finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Final

from celery import Celery
from celery.beat import EmbeddedService
from celery.exceptions import CPendingDeprecationWarning, SecurityWarning
from redis.exceptions import AuthenticationError

from tokenmill.errors import ConfigurationError
from tokenmill.transport.connect import SERVER_TROUBLE, Link, connect, server_words
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.record.result_store import ResultStore
from tokenmill_worker.settings import Settings
from tokenmill_worker.tasks.app import QUEUES, build_app
from tokenmill_worker.tasks.bulk_files import THREADS
from tokenmill_worker.tasks.health import TasksHealth
from tokenmill_worker.tasks.resources import TaskResources
from tokenmill_worker.telemetry import configure_logging

log = logging.getLogger(__name__)

BEAT_END_S: Final = 5.0  # beat's thread ends with the process at the latest


def run(settings: Settings) -> int:
    """Serve until a signal; returns the exit status. Raises SettingsError, SchemaOutdated,
    StoreUnavailable, PortTaken.
    """
    configure_logging(settings.log_level, settings.log_format, with_private=settings.log_prompts)
    if settings.log_level != "debug":
        _calm_celery()
    resources = TaskResources(settings)
    app = build_app(settings, resources)
    asyncio.run(_check(settings))
    _check_password(settings)
    if not settings.webhook_secret:
        log.warning(
            "No webhook is sent: TOKENMILL_WEBHOOK_SECRET is not set; "
            "`tokenmill webhooks secret --new` makes one"
        )
    # Beat runs on a thread: as Celery's own process it would outlive a killed parent.
    # The default scheduler pickles.
    beat = EmbeddedService(app, thread=True, scheduler_cls=app.conf.beat_scheduler)
    with _served(
        settings,
        TasksHealth(
            app,
            resources.backlog,
            lambda: beat.ident is None or beat.is_alive(),
            batches=resources.open_batches,
        ),
    ):
        worker = app.Worker(
            pool="threads",
            concurrency=THREADS,
            queues=list(QUEUES),
            without_mingle=True,
            without_gossip=True,
            without_heartbeat=True,
            loglevel=settings.log_level.upper(),
            quiet=True,
        )
        log.info(
            "Running tasks on %d threads from the queues %s",
            THREADS,
            ", ".join(QUEUES),
        )
        _work(worker, beat)
    return int(worker.exitcode or 0)


def _calm_celery() -> None:
    """Silence Celery: no line for each sweep, and no traceback for each try while the broker is
    away.
    """
    logging.getLogger("celery").setLevel(logging.WARNING)
    logging.getLogger("celery.beat").addFilter(BeatLogThrottle())
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    # about root and pickle, which is refused here
    warnings.filterwarnings("ignore", category=SecurityWarning)


class BeatLogThrottle(logging.Filter):
    """Shortens each failure of beat to one line, and logs the same line once a minute."""

    def __init__(self, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info is None:
            return True
        error = str(record.exc_info[1])
        record.msg, record.args, record.exc_info = (
            "Celery's beat cannot start its tasks: %s",
            (error,),
            None,
        )
        now = self._clock()
        if now - self._logged_at.get(error, -self._every_s) < self._every_s:
            return False
        self._logged_at[error] = now
        return True


def _work(worker: Celery.Worker, beat: EmbeddedService) -> None:
    beat.start()
    try:
        worker.start()
    finally:
        # Not `beat.stop`: it waits for beat's end, and beat does not see the stop while it looks
        # for
        # its broker.
        beat.service.stop()
        beat.join(BEAT_END_S)


@contextlib.contextmanager
def _served(settings: Settings, health: TasksHealth) -> Iterator[None]:
    if settings.metrics_port is None:
        yield
        return
    port = health.start(settings.metrics_host, settings.metrics_port)
    log.info("Metrics and health are served on http://%s:%d", settings.metrics_host, port)
    try:
        yield
    finally:
        health.stop()


def _check_password(settings: Settings) -> None:
    """Check the broker's login. Raises RedisUnavailable if the broker refuses the user, since
    Celery would retry for ever. If the broker is away, Celery keeps trying.
    """
    url = settings.tasks_broker_url or settings.redis_url
    if not url.startswith(("redis", "unix")):
        return  # another kind of broker
    try:
        connection = connect(url, Link(timeout_s=5, connect_timeout_s=5))
        try:
            connection.ping()
        finally:
            connection.close()
    except AuthenticationError as error:
        raise RedisUnavailable(
            f"Redis refuses this user: {error}", is_misconfigured=True
        ) from error
    except (*SERVER_TROUBLE, ConfigurationError) as error:
        log.warning(
            "The broker cannot be reached yet; Celery keeps trying: %s", server_words(error)
        )


async def _check(settings: Settings) -> None:
    store = ResultStore(settings.database_url)
    try:
        await store.check()
    finally:
        await store.close()
