"""The Celery application: MessagePack only, the tasks, and beat's schedule.

Celery carries the calls, and SQL holds the work to be done. So a task may be lost with the broker,
or run twice: the next sweep finds the work again, and finished work stays finished. Results are not
kept, remote control and gossip are off, and all keys have a prefix of their own beside the queues'
keys.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from celery import Celery

from tokenmill.transport.connect import parse_url
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.settings import Settings
from tokenmill_worker.tasks.registry import (
    BULK,
    FILES_SCHEDULE,
    SCHEDULE,
    UPKEEP,
    WEBHOOKS,
    register,
)
from tokenmill_worker.tasks.resources import TaskResources

VISIBILITY_S: Final = 900  # a task of a dead process starts in another one after this time


def build_app(settings: Settings, resources: TaskResources | None = None) -> Celery:
    """Build the application. Raises SettingsError if the queue's server cannot be Celery's broker
    too.
    """
    app = Celery("tokenmill", set_as_current=False)
    app.conf.update(
        broker_url=broker_url(settings),
        broker_transport_options={
            "global_keyprefix": f"{settings.key_prefix}tasks:",
            "visibility_timeout": VISIBILITY_S,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
        },
        broker_connection_retry_on_startup=True,
        # no limit: by default Celery ends after an hour without its broker
        broker_connection_max_retries=None,
        task_serializer="msgpack",
        result_serializer="msgpack",
        accept_content=["msgpack"],
        result_accept_content=["msgpack"],
        task_ignore_result=True,
        task_default_queue=UPKEEP,
        task_routes={
            "tokenmill.bulk.*": {"queue": BULK},
            "tokenmill.batches.*": {"queue": BULK},
            "tokenmill.webhooks.*": {"queue": WEBHOOKS},
        },
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_send_task_events=False,
        beat_scheduler="celery.beat:Scheduler",  # writes no file: the persistent one pickles
        beat_schedule=beat_schedule(has_files=bool(settings.files)),
        enable_utc=True,
    )
    register(app, resources or TaskResources(settings))
    return app


def beat_schedule(*, has_files: bool = True) -> dict[str, dict[str, Any]]:
    """Return beat's schedule, with that of files where they are kept. A sweep that waited longer
    than its interval is dropped, because the next one finds the same work.
    """
    return {
        name: {
            "task": name,
            "schedule": timedelta(seconds=seconds),
            "options": {"expires": seconds, "queue": queue},
        }
        for name, seconds, queue in (*SCHEDULE, *(FILES_SCHEDULE if has_files else ()))
    }


def broker_url(settings: Settings) -> str:
    """Return the broker's URL as Celery writes it. Raises SettingsError for a URL that Celery
    cannot use.
    """
    url = settings.tasks_broker_url or settings.redis_url
    if not settings.tasks_broker_url and parse_url(url).kind != "single":
        raise SettingsError(
            [
                "TOKENMILL_TASKS_BROKER_URL must name a single Redis, or a sentinel as Celery "
                "spells "
                "it: the queue is on a Sentinel or Cluster URL, which Celery does not read"
            ]
        )
    return f"redis+socket://{url.removeprefix('unix://')}" if url.startswith("unix://") else url


QUEUES: Final = (WEBHOOKS, UPKEEP, BULK)
