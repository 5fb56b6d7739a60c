"""Periodic and slow work beside the stream of jobs, run by Celery: webhooks, bulk files, usage
sums, retention.

`tokenmill tasks` runs it all in one process; `celery -A tokenmill_worker.tasks worker -B -P
threads` does the same with Celery's own options. The application is built at its first use, from
the same settings as a worker.

Belongs here: what may run late, and on another machine than the model. Nothing here serves a job.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def _app() -> Any:
    from tokenmill_worker.settings import load_settings
    from tokenmill_worker.tasks.app import build_app

    return build_app(load_settings())


def __getattr__(name: str) -> Any:
    """Build the application when `celery -A tokenmill_worker.tasks` looks for `app`."""
    if name == "app":
        return _app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
