"""Counts how often each task ran in this process and how it ended, and records its duration and
last success.

Celery's signals supply the events; only tasks of one application are counted. If a task returns a
text, the text is its outcome.
"""

from __future__ import annotations

import time
from typing import Any, Final

from celery import Celery, signals
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tokenmill_worker.telemetry.instruments import PREFIX

_SECONDS: Final = (0.005, 0.025, 0.1, 0.5, 2.5, 10, 60, 300)


class TaskCounts:
    """Counts from `start` to `stop`."""

    def __init__(self, app: Celery, registry: CollectorRegistry) -> None:
        self._app = app
        self._began: dict[str, float] = {}
        self._runs = Counter(
            f"{PREFIX}task_runs_total",
            "Runs of a task, by how they ended",
            ("task", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            f"{PREFIX}task_seconds",
            "Time of one run",
            ("task",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._succeeded = Gauge(
            f"{PREFIX}task_last_success_timestamp_seconds",
            "Unix time of a periodic task's last success in this process, or of the process's start",
            ("task",),
            registry=registry,
        )

    def start(self) -> None:
        for name in self._app.conf.beat_schedule:
            self._succeeded.labels(name).set_to_current_time()
            self._runs.labels(
                name, "failure"
            )  # exists from the start, so that the first failure shows as an increase
        signals.task_prerun.connect(self._prerun, weak=False)
        signals.task_postrun.connect(self._postrun, weak=False)

    def stop(self) -> None:
        signals.task_prerun.disconnect(self._prerun)
        signals.task_postrun.disconnect(self._postrun)

    def _prerun(self, *, task_id: str, task: Any, **_: Any) -> None:
        if task.app is self._app:
            self._began[task_id] = time.monotonic()

    def _postrun(self, *, task_id: str, task: Any, state: str, retval: Any, **_: Any) -> None:
        began = self._began.pop(task_id, None)
        if began is None:
            return
        self._seconds.labels(task.name).observe(time.monotonic() - began)
        has_word = state == "SUCCESS" and isinstance(retval, str)
        self._runs.labels(task.name, retval if has_word else state.lower()).inc()
        if state == "SUCCESS" and task.name in self._app.conf.beat_schedule:
            self._succeeded.labels(task.name).set_to_current_time()
