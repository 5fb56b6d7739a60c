"""Periodic and slow work beside the stream of jobs, through Celery: webhooks, bulk files, sums, retention.

`tokenmill tasks` runs it all in one process; `celery -A worker.tasks worker -B -P threads` is the same with
Celery's own options. The application is built when it is first asked for, from the same settings as a worker.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def _app() -> Any:
    from worker.settings import load_settings
    from worker.tasks.app import build_app

    return build_app(load_settings())


def __getattr__(name: str) -> Any:
    """`celery -A worker.tasks` looks for `app`."""
    if name == "app":
        return _app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
