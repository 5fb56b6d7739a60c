"""A worker's Prometheus metrics, in a registry of their own.

A metric with vLLM's meaning has vLLM's name, with the prefix `tokenmill:` for `vllm:`, so that
vLLM's dashboards need only the prefix replaced. Each metric carries `queue` and `model_name`.
Single events are counted here; numbers that parts count already are read at each scrape
(`add_source`). Only labels with few values are used: no job ids, and no tenants, whose number a
service does not control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.job import Priority
from tokenmill_schemas.result import JobResult, JobStatus
from tokenmill_worker.telemetry.instruments import (
    PREFIX,
    CallbackCollector,
    ConstLabels,
    HistogramFamily,
    MetricSample,
)

_SECONDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600,
)  # fmt: skip
_PER_TOKEN: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_CALL: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
_TOKENS: Final = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
)  # fmt: skip
_BATCH: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


class Metrics:
    """The metrics of one worker. Times are seconds."""

    def __init__(self, queue: str = "", model_name: str = "") -> None:
        self._inner = CollectorRegistry(auto_describe=False)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(ConstLabels(self._inner, {"queue": queue, "model_name": model_name}))
        # requests, in vLLM's names
        # Counters of known labels start at 0, so that the first event shows as an increase.
        self.success = self._counter(
            "request_success_total", "Requests that ended, by reason", ("finished_reason",)
        )
        for finish_reason in FinishReason:
            self.success.labels(finish_reason.value)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time from creation to the first token", _SECONDS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Time from creation to the first claim", _SECONDS
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Time from the engine to the first token", _SECONDS
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Time from the first token to the last", _SECONDS
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from creation to the end", _SECONDS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after its first",
            _PER_TOKEN,
        )
        self.prompt_size = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request", _TOKENS
        )
        self.answer_size = self._histogram(
            "request_generation_tokens", "Generated tokens of a request", _TOKENS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Time between a request's tokens, as published",
            _PER_TOKEN,
        )
        # the engine's steps
        self.step_seconds = self._histogram(
            "engine_step_seconds",
            "Time of an engine step; short steps within 0.1 s count with their mean",
            _PER_TOKEN,
            None,
        )
        self.step_tokens = self._histogram(
            "iteration_tokens_total",
            "Tokens computed in an engine step; short steps within 0.1 s count with their mean",
            _BATCH,
            None,
        )
        # the queue, Redis and SQL
        self.jobs = self._counter(
            "jobs_finished_total", "Jobs recorded, by status", ("status", "priority")
        )
        for status, priority in product(JobStatus, Priority):
            if status.is_final:
                self.jobs.labels(status.value, priority.value)
        self.errors = self._counter(
            "job_errors_total", "Jobs recorded with an error, by its code", ("code",)
        )
        self.claims = self._counter(
            "claims_total", "Claims; the outcome is `jobs` or `empty`", ("outcome",)
        )
        self.deliveries = self._counter(
            "deliveries_total",
            "Jobs delivered to this worker",
            ("outcome", "redelivered"),
        )
        self.left = self._counter(
            "jobs_left_total", "Jobs that left this worker unfinished, by reason", ("reason",)
        )
        for reason in ("handed_over", "crash", "retry", "lost"):
            self.left.labels(reason)
        self.refusals = self._counter(
            "fencing_refusals_total",
            "Writes refused because another worker owns the job",
            ("call",),
        )
        for call in ("append", "finish", "release"):
            self.refusals.labels(call)
        self.lost_by_server = Counter(
            PREFIX + "jobs_lost_by_server_total",
            "Jobs that waited or ran and of which the server has no record any more",
            registry=self._inner,
        )
        self.commit_seconds = self._histogram(
            "sql_commit_seconds", "Time of one SQL transaction of finished jobs", _CALL, None
        )
        self.call_seconds = self._histogram(
            "redis_call_seconds", "Time of one script call, retries included", _CALL, "script"
        )

    def request_finished(self, result: JobResult, priority: str) -> None:
        """Record a result from its own values, which cover every worker that ran the job."""
        usage, tokens = result.usage, result.usage.completion_tokens
        reason = (
            result.finish_reason.value if result.finish_reason is not None else result.status.value
        )
        self.success.labels(reason).inc()
        self.jobs.labels(result.status.value, priority).inc()
        if result.error is not None:
            self.errors.labels(result.error.code).inc()
        self.queue_time.of(priority).observe(max(0, usage.queue_ms) / 1000)
        self.e2e.of(priority).observe(max(0, usage.total_ms) / 1000)
        if usage.prompt_tokens:
            self.prompt_size.of(priority).observe(usage.prompt_tokens)
        if tokens:
            self.answer_size.of(priority).observe(tokens)
            self.first_token.of(priority).observe(max(0, usage.ttft_ms) / 1000)
        if tokens > 1:
            rest_ms = max(0, usage.total_ms - usage.ttft_ms)
            self.per_token.of(priority).observe(rest_ms / 1000 / (tokens - 1))

    def add_source(self, source: Callable[[], Iterable[MetricSample]]) -> None:
        """Export `source()`'s samples at each scrape."""
        self._inner.register(CallbackCollector(source))

    def add_queue_source(self, source: Callable[[], Iterable[MetricSample]]) -> None:
        """Export samples that name their queue themselves; else like `add_source`."""
        self.registry.register(CallbackCollector(source))

    def _counter(self, name: str, words: str, labels: tuple[str, ...]) -> Counter:
        return Counter(PREFIX + name, words, labels, registry=self._inner)

    def _histogram(
        self, name: str, words: str, bounds: tuple[float, ...], label: str | None = "priority"
    ) -> HistogramFamily:
        family = HistogramFamily(name, words, bounds, label)
        self._inner.register(family)
        return family
