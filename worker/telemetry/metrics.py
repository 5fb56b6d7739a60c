"""Prometheus metrics in a registry of their own, handed to whoever needs it; nothing is global.

Two ways in: what happens once is counted here (`job_finished`, `claimed`, …); what others count already
(engine, finalizer, publisher) is read at each scrape through `watch`. Labels are only those that stay few:
no job ids, and no tenants, whose number a service does not control.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.result import JobResult

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PER_TOKEN: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_COMMIT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)

Source = Callable[[], Mapping[str, float | int | None]]


class _Watched(Collector):
    """Turns a part's own counters into metrics at the moment of a scrape."""

    def __init__(self, prefix: str, source: Source, gauges: Collection[str]) -> None:
        self._prefix = prefix
        self._source = source
        self._gauges = frozenset(gauges)

    def collect(self) -> Iterator[Metric]:
        for name, value in self._source().items():
            if value is None:
                continue
            title, words = f"{self._prefix}_{name}", f"{name.replace('_', ' ')} of the {self._prefix.split('_')[-1]}"
            if name in self._gauges:
                yield GaugeMetricFamily(title, words, value=float(value))
            else:
                yield CounterMetricFamily(title, words, value=float(value))

    def describe(self) -> list[Metric]:
        return []  # the names are known at the first scrape only


class Metrics:
    """One worker's. Times in seconds."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry(auto_describe=False)

        def counter(name: str, words: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"tokenmill_{name}", words, labels, registry=self.registry)

        def histogram(name: str, words: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"tokenmill_{name}", words, labels, buckets=buckets, registry=self.registry)

        self.claims = counter("claims_total", "Claims tried, and how they ended", ("outcome",))
        self.claimed = counter("jobs_claimed_total", "Jobs claimed, by where they came from", ("source",))
        self.finished = counter("jobs_finished_total", "Jobs at their end", ("status", "priority"))
        self.tokens = counter("tokens_total", "Tokens of finished jobs", ("kind",))
        self.lost = counter("jobs_lost_total", "Jobs that another worker holds by now")
        self.errors = counter("errors_total", "Errors that were survived", ("part",))
        self.queue_seconds = histogram("queue_seconds", "Created to first claimed", _SECONDS, ("priority",))
        self.first_token_seconds = histogram("first_token_seconds", "Created to first token", _SECONDS, ("priority",))
        self.token_seconds = histogram("token_seconds", "Time per token after the first", _PER_TOKEN, ("priority",))
        self.job_seconds = histogram("job_seconds", "Created to finished", _SECONDS, ("priority",))
        self.commit_seconds = histogram("commit_seconds", "One SQL transaction of finished jobs", _COMMIT)
        self.queue_depth = Gauge(
            "tokenmill_queue_depth", "Jobs that wait in the queue", ("priority",), registry=self.registry
        )

    def job_finished(self, result: JobResult, priority: str) -> None:
        usage = result.usage
        self.finished.labels(result.status.value, priority).inc()
        self.tokens.labels("prompt").inc(usage.prompt_tokens)
        self.tokens.labels("cached").inc(usage.cached_tokens)
        self.tokens.labels("completion").inc(usage.completion_tokens)
        self.queue_seconds.labels(priority).observe(max(0, usage.queue_ms) / 1000)
        self.job_seconds.labels(priority).observe(max(0, usage.total_ms) / 1000)
        if usage.completion_tokens > 0:
            self.first_token_seconds.labels(priority).observe(max(0, usage.ttft_ms) / 1000)
        if usage.completion_tokens > 1:
            rest_ms = max(0, usage.total_ms - usage.ttft_ms)
            self.token_seconds.labels(priority).observe(rest_ms / 1000 / (usage.completion_tokens - 1))

    def watch(self, part: str, source: Source, gauges: Collection[str] = ()) -> None:
        """`source()` gives a part's numbers at each scrape: counters, but for the names in `gauges`; None: left out."""
        self.registry.register(_Watched(f"tokenmill_{part}", source, gauges))
