"""Removes what is old: first a job's payload, then its row; usage last, after it has been summed
for good.

Rows are removed in small batches with pauses between them, so that workers can write meanwhile.
Every step may be interrupted and repeated. A limit of 0 days keeps rows for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import Engine, delete, func, null, select, update

from tokenmill_schemas.tables import jobs, usage, webhooks
from tokenmill_worker.tasks.usage_rollup import RollUp

_DAY_MS: Final = 86_400_000
_PAYLOAD: Final = (
    "text",
    "reasoning",
    "token_ids",
    "logprobs",
    "error_message",
    "prompt",
    "params",
    "metadata",
    "envelope",
    "result",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Ages in days; 0 keeps for ever. `batch`: rows per transaction. `pause_s`: pause after each.
    `run_s`: about how long a run takes at most.
    """

    payload_days: float = 0
    job_days: float = 0
    usage_days: float = 0
    webhook_days: float = 0
    batch: int = 500
    pause_s: float = 0.02
    run_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Removed:
    payloads: int = 0
    jobs: int = 0
    usage: int = 0
    webhooks: int = 0

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))


class Retention:
    """Removes old rows. `run` blocks; two runs at once do no harm."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        roll_up: RollUp,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._roll_up = roll_up
        self._clock = clock

    def run(self) -> Removed:
        """Remove as much as the time allows; the next run continues."""
        until = time.monotonic() + self._limits.run_s
        return Removed(
            jobs=self._repeat(self._limits.job_days, self._remove_jobs, until),
            payloads=self._repeat(self._limits.payload_days, self._empty_jobs, until),
            usage=self._remove_usage(until),
            webhooks=self._repeat(self._limits.webhook_days, self._remove_webhooks, until),
        )

    def _repeat(self, days: float, step: Callable[[int], Any], until: float) -> int:
        """Repeat a batch until one is not full. `step(cutoff_ms)` returns the statement that
        processes one batch. Returns the number of rows.
        """
        if not days:
            return 0
        return self._drain(step(round(self._clock() * 1000 - days * _DAY_MS)), until)

    def _drain(self, statement: Any, until: float) -> int:
        treated, last = 0, self._limits.batch
        while last == self._limits.batch and time.monotonic() < until:
            with self._engine.begin() as connection:
                last = connection.execute(statement).rowcount
            treated += last
            time.sleep(self._limits.pause_s)
        return treated

    def _remove_jobs(self, cutoff_ms: int) -> Any:
        old = (
            select(jobs.c.id)
            .where(jobs.c.finished_ms < cutoff_ms)
            .order_by(jobs.c.finished_ms, jobs.c.id)
        )
        return delete(jobs).where(jobs.c.id.in_(old.limit(self._limits.batch)))

    def _empty_jobs(self, cutoff_ms: int) -> Any:
        """Clear what was asked and answered. Owner, times, outcome and amounts stay."""
        full = select(jobs.c.id).where(jobs.c.result.is_not(None), jobs.c.finished_ms < cutoff_ms)
        full = full.order_by(jobs.c.finished_ms, jobs.c.id).limit(self._limits.batch)
        return update(jobs).where(jobs.c.id.in_(full)).values(dict.fromkeys(_PAYLOAD, null()))

    def _remove_webhooks(self, cutoff_ms: int) -> Any:
        over = webhooks.c.state.in_(("delivered", "dead", "superseded"))
        old = (
            select(webhooks.c.id)
            .where(over, webhooks.c.due_ms < cutoff_ms)
            .limit(self._limits.batch)
        )
        return delete(webhooks).where(webhooks.c.id.in_(old))

    def _remove_usage(self, until: float) -> int:
        """Remove the usage of whole days, oldest first. Readers trust the daily sums up to the
        newest, so the sums are made first.
        """
        if not self._limits.usage_days:
            return 0
        self._roll_up.recent()
        first_kept = datetime.fromtimestamp(self._clock(), UTC) - timedelta(
            days=self._limits.usage_days
        )
        removed = 0
        while time.monotonic() < until:
            with self._engine.connect() as connection:
                oldest = connection.scalar(select(func.min(usage.c.day)))
            if oldest is None or oldest >= first_kept.date().isoformat():
                break
            self._roll_up.seal(oldest)
            rows = select(usage.c.job_id).where(usage.c.day == oldest).limit(self._limits.batch)
            removed += self._drain(delete(usage).where(usage.c.job_id.in_(rows)), until)
        return removed
