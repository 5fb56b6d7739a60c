"""A user's Celery application; `celery -A tests.client.celery.backend_app` and a test import it."""

import os
from typing import Any

from celery import Celery

from tokenmill.celery import generation_task

URL = os.environ.get("BACKEND_REDIS_URL", "redis://localhost:6379/0")  # noqa: TID251 - a program of its own

app = Celery("backend", broker=URL, backend=URL)
PREFIX = {"global_keyprefix": "backend:"}
app.conf.update(
    task_serializer="json",
    accept_content=["json"],
    worker_enable_remote_control=False,
    result_expires=600,
    broker_transport_options=PREFIX,
    result_backend_transport_options=PREFIX,
    broker_connection_retry_on_startup=True,
)
generate = generation_task(app, queue="q", url=URL, wait_s=0.2, defaults={"seed": 1})
tell = generation_task(app, queue="q", name="tell", url=URL, wait_s=0.2, returns="text")


def _count(values: Any) -> int:
    return len(values)


def _shout(value: Any) -> str:
    return f"<{value['text'] if isinstance(value, dict) else value}>"


count = app.task(name="count", shared=False)(_count)
shout = app.task(name="shout", shared=False)(_shout)
