"""Reports the state of a worker to its operators: health checks, metrics, the heartbeat.

This module defines when a worker is healthy, ready and alive, and which number of which part is
which metric.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from tokenmill.sql.engine import missing_file
from tokenmill.transport.server_clock import MAX_SKEW_S
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.release import version
from tokenmill_worker.publish.publisher import Publisher
from tokenmill_worker.queue.job_stream import JobStream
from tokenmill_worker.queue.leases import LeaseKeeper
from tokenmill_worker.record.finalizer import Finalizer
from tokenmill_worker.service import Service
from tokenmill_worker.settings import Settings
from tokenmill_worker.telemetry import Check, Watchdog
from tokenmill_worker.telemetry.instruments import MetricSample, by_label, counter, gauge
from tokenmill_worker.telemetry.job_telemetry import JobTelemetry

log = logging.getLogger(__name__)

# (field of the counters, metric, help)
_ENGINE_GAUGES: Final = (
    ("num_running", "num_requests_running", "Sequences in the running batch"),
    ("num_waiting", "num_requests_waiting", "Sequences that wait in the engine"),
    ("num_offloaded", "num_requests_offloaded", "Preempted sequences kept in host memory"),
    ("blocks_cached", "kv_cache_cached_blocks", "Free KV blocks that still hold a cached prefix"),
)
_ENGINE_COUNTERS: Final = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests"),
    ("generated_tokens", "generation_tokens", "Tokens generated"),
    ("computed_tokens", "computed_tokens", "Tokens put through the model, prefill and decode"),
    ("recomputed_tokens", "recomputed_tokens", "Tokens computed again after a preemption"),
    ("prefix_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    ("cached_tokens", "prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    ("preemptions", "num_preemptions", "Sequences that were preempted"),
    ("evicted_blocks", "kv_blocks_evicted", "KV blocks evicted from the prefix cache"),
    ("blocks_swapped_out", "kv_blocks_offloaded", "KV blocks copied to host memory"),
    ("blocks_swapped_in", "kv_blocks_restored", "KV blocks copied back from host memory"),
    ("disk_blocks_read", "kv_disk_hits", "KV blocks read from the cache on disk"),
    ("disk_blocks_missed", "kv_disk_misses", "KV blocks of prompts that were not on disk"),
    ("disk_blocks_written", "kv_disk_writes", "KV blocks written to the cache on disk"),
    ("draft_tokens", "spec_decode_num_draft_tokens", "Draft tokens"),
    ("accepted_tokens", "spec_decode_num_accepted_tokens", "Draft tokens that were accepted"),
    ("steps", "engine_steps", "Engine steps"),
    ("failed_steps", "engine_failed_steps", "Engine steps that failed and were bisected"),
    ("busy_s", "engine_busy_seconds", "Time inside engine steps"),
)
_SQL_COUNTERS: Final = (
    ("groups", "sql_commits", "SQL transactions of finished jobs"),
    ("record_failures", "sql_commit_failures", "SQL transactions that failed and are repeated"),
    ("recorded", "jobs_recorded", "Jobs recorded in SQL"),
    ("recorded_before", "jobs_recorded_before", "Redelivered jobs that SQL had already"),
    ("acknowledged", "jobs_acknowledged", "Jobs acknowledged after their commit"),
    ("refused", "jobs_refused_by_sql", "Tries in which the database refused a job"),
)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts that the checks and metrics read."""

    settings: Settings
    service: Service
    stream: JobStream
    lease: LeaseKeeper
    publisher: Publisher
    finalizer: Finalizer
    observer: JobTelemetry


class StatusReporter:
    """Reports on one worker. `is_stopping()` returns whether the worker was asked to stop."""

    def __init__(self, parts: WorkerParts, *, is_stopping: Callable[[], bool]) -> None:
        self._parts = parts
        self._is_stopping = is_stopping
        self._started_at, self._began = time.time(), time.monotonic()
        self._started_ms = 0  # by the server's clock, once it is known
        self._told_of_skew = False
        self.claims = Watchdog("claim", limit_s=parts.settings.stall_seconds)
        self.steps = Watchdog("engine frame", limit_s=parts.settings.stall_seconds)

    # ── checks ──

    def checks(self) -> list[Check]:
        parts = self._parts
        return [
            Check(
                "engine",
                lambda: None if parts.service.health.engine_ready else "the engine is not running",
            ),
            Check("steps", self._steps_problem, vital=True),
            Check("claims", lambda: None if self._is_stopping() else self.claims.problem()),
            Check("redis", lambda: parts.lease.problem or parts.stream.server.problem),
            Check("sql", self._sql_problem),
            Check(
                "buffer",
                lambda: (
                    "finished jobs wait for SQL: no job is claimed"
                    if parts.finalizer.is_full
                    else None
                ),
            ),
            Check(
                "drain",
                lambda: "it drains and claims no job" if self._is_stopping() else None,
                ready=True,
            ),
        ]

    def _steps_problem(self) -> str | None:
        """Return a sentence if steps are overdue. An engine that is loading makes none."""
        return self.steps.problem() if self._parts.service.health.engine_ready else None

    def _sql_problem(self) -> str | None:
        if (path := missing_file(self._parts.settings.database_url)) is not None:
            return (
                f"SQL: there is no database at {path}: results wait until `tokenmill db upgrade` "
                "has made it"
            )
        stats = self._parts.finalizer.stats
        return f"SQL: {stats.last_error}" if stats.record_down_since is not None else None

    # ── the heartbeat ──

    def status(self) -> WorkerStatus:
        parts, observer = self._parts, self._parts.observer
        stats, health = parts.service.health.stats, parts.service.health
        processor = parts.service.entrance.processor
        served = None if processor is None else processor.model  # None while it loads
        observer.forget_all_but({*parts.stream.owned, *parts.finalizer.held_ids})
        observer.log_lines()
        if not self._started_ms:  # fixed: a process that started later replaces this one
            since_ms = round((time.monotonic() - self._began) * 1000)
            self._started_ms = parts.stream.clock.now_ms() - since_ms
        self._tell_of_skew(parts.stream.clock.skew_s)
        return WorkerStatus(
            worker_id=parts.settings.worker_name,
            model="" if served is None else served.names[0],
            version=package_version(),
            started_ms=self._started_ms,
            running=stats.num_running,
            waiting=stats.num_waiting,
            free_blocks=stats.blocks_free,
            tokens_per_s=round(observer.tokens.per_s, 1),
            draining=self._is_stopping(),
            max_running=parts.service.max_num_seqs,
            total_blocks=stats.blocks_total,
            cached_blocks=stats.blocks_cached,
            prefix_hits=round(stats.cached_tokens / stats.prefix_queries, 3)
            if stats.prefix_queries
            else None,
            queue_ms=_milliseconds(observer.queue_s.percentiles(0.5, 0.95)),
            first_token_ms=_milliseconds(observer.first_token_s.percentiles(0.5, 0.95)),
            token_ms=_milliseconds(observer.token_s.percentiles(0.5, 0.95)),
            to_record=len(parts.finalizer),
            engine_restarts=health.engine_restarts,
            problems=tuple(
                problem
                for check in self.checks()
                if not check.ready and (problem := check.problem())
            ),
            tenants=observer.tenants(),
            max_model_len=0 if served is None else served.max_model_len,
            adapters=() if served is None else tuple(sorted(served.adapters)),
            aliases={} if served is None else served.further_names,
            pace=round(observer.ended_tokens.per_s, 1),
            urgent=observer.urgent(),
        )

    def _tell_of_skew(self, skew_s: float) -> None:
        if abs(skew_s) > MAX_SKEW_S and not self._told_of_skew:
            self._told_of_skew = True
            log.warning(
                "This machine's clock is %.1f s %s the Redis server's: deadlines and recorded times"
                " follow the server's, times in this log do not",
                abs(skew_s),
                "ahead of" if skew_s > 0 else "behind",
            )

    # ── the numbers ──

    def samples(self) -> Iterator[MetricSample]:
        yield from self._engine()
        yield from self._owned()
        yield from self._sql()
        yield from self._health()

    def _engine(self) -> Iterator[MetricSample]:
        health = self._parts.service.health
        stats = health.stats
        for field, name, words in _ENGINE_GAUGES:
            yield gauge(name, words, getattr(stats, field))
        for field, name, words in _ENGINE_COUNTERS:
            yield counter(name, words, getattr(stats, field))
        yield by_label(
            "kv_disk_failures", "Faults of the cache on disk, each of which cost a hit at most",
            "reason", stats.disk_failures, is_counter=True,
        )  # fmt: skip
        most = self._parts.service.max_num_seqs
        yield gauge("num_requests_max", "Most sequences in the running batch", most)
        used = stats.blocks_total - stats.blocks_free
        usage = used / stats.blocks_total if stats.blocks_total else None
        yield gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is full", usage)
        yield gauge("kv_cache_blocks", "All KV blocks", stats.blocks_total or None)
        replaced = "Engine processes that were replaced"
        yield counter("engine_restarts", replaced, health.engine_restarts)

    def _owned(self) -> Iterator[MetricSample]:
        parts, observer = self._parts, self._parts.observer
        yield gauge("leases_held", "Jobs that this worker owns", len(parts.stream.owned))
        yield gauge(
            "tokens_unlogged",
            "Generated tokens that are not in Redis yet",
            parts.publisher.num_unlogged,
        )
        yield counter("heartbeats", "Heartbeats that renewed the lease", parts.lease.num_renewed)
        yield counter("heartbeat_failures", "Heartbeats that failed", parts.lease.num_failed)
        yield counter(
            "lease_expirations",
            "Times this process was frozen for longer than its lease",
            parts.lease.num_expired,
        )
        trips = by_label(
            "redis_round_trips", "Script calls, each try counted", "script",
            observer.redis_round_trips, is_counter=True,
        )  # fmt: skip
        yield trips
        yield by_label(
            "redis_failures", "Script calls whose last try failed", "script",
            {**dict.fromkeys(observer.redis_round_trips, 0), **observer.redis_failures},
            is_counter=True,
        )  # fmt: skip

    def _sql(self) -> Iterator[MetricSample]:
        finalizer, stats = self._parts.finalizer, self._parts.finalizer.stats
        yield gauge(
            "record_buffer_jobs",
            "Finished jobs that are not recorded and acknowledged yet",
            len(finalizer),
        )
        limit = finalizer.limits.max_buffered
        yield gauge("record_buffer_limit_jobs", "Finished jobs at which claiming stops", limit)
        yield gauge(
            "record_buffer_bytes",
            "Estimated memory of finished jobs that wait; claiming stops at 512 MiB",
            finalizer.num_bytes,
        )
        for field, name, words in _SQL_COUNTERS:
            yield counter(name, words, getattr(stats, field))

    def _health(self) -> Iterator[MetricSample]:
        up, all_well = {}, True
        for check in self.checks():
            problem = check.problem()
            all_well = all_well and problem is None
            if check.name in ("engine", "redis", "sql"):
                up[check.name] = float(problem is None)
        yield by_label("dependency_up", "1 while the dependency can be used", "dependency", up)
        yield gauge("ready", "1 while /readyz answers 200", float(all_well))
        skew_s = self._parts.stream.clock.skew_s
        yield gauge("clock_skew_seconds", "This clock's lead over the Redis server's", skew_s)
        yield gauge("draining", "1 after the signal to stop", float(self._is_stopping()))
        yield gauge("start_time_seconds", "Unix time of the worker's start", self._started_at)
        labels = ("version", "worker")
        values: dict[tuple[str, ...], float | None] = {
            (package_version(), self._parts.settings.worker_name): 1.0
        }
        yield MetricSample("build_info", "Version and name of this worker", values, labels)


@cache
def package_version() -> str:
    """Return the version. It is read once: that takes a process or a file, and each heartbeat needs
    it.
    """
    return version()


def _milliseconds(pair: tuple[float | None, ...]) -> tuple[float, float] | None:
    low, high = pair
    return None if low is None or high is None else (round(low * 1000, 1), round(high * 1000, 1))
