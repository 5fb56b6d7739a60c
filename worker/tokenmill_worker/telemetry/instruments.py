"""Adds to prometheus_client: constant labels, values read at the scrape, and a histogram for hot
paths.

`FastHistogram` records many equal observations in one call, and sums its buckets at the scrape.
`CallbackCollector` turns numbers that a part counts anyway into metrics. `ConstLabels` adds the
same labels to everything in a registry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isinf
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX: Final = "tokenmill:"


@dataclass(slots=True)
class FastHistogram:
    """A histogram: counts per bucket. `bounds` are upper limits, ascending."""

    bounds: Sequence[float]
    total: float = 0.0
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, count) pairs as Prometheus expects them: cumulative, the last one
        unbounded.
        """
        running = 0
        pairs = []
        for bound, count in zip([*self.bounds, inf], self.counts, strict=True):
            running += count
            pairs.append(("+Inf" if isinf(bound) else str(float(bound)), float(running)))
        return pairs


class HistogramFamily(Collector):
    """A metric with one histogram per value of a label, created at its first use. Without a label
    it has a single histogram.
    """

    def __init__(
        self, name: str, words: str, bounds: Sequence[float], label: str | None = None
    ) -> None:
        self._name, self._words, self._bounds, self._label = (
            PREFIX + name,
            words,
            tuple(bounds),
            label,
        )
        self._histograms: dict[str, FastHistogram] = (
            {} if label else {"": FastHistogram(self._bounds)}
        )

    def of(self, value: str = "") -> FastHistogram:
        histogram = self._histograms.get(value)
        if histogram is None:
            histogram = self._histograms[value] = FastHistogram(self._bounds)
        return histogram

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            self._name, self._words, labels=[self._label] if self._label else []
        )
        for value, histogram in list(self._histograms.items()):
            family.add_metric([value] if self._label else [], histogram.buckets(), histogram.total)
        yield family

    def describe(self) -> list[Metric]:
        return []


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One metric's values at a scrape, by the values of its labels. None is not exported."""

    name: str
    words: str
    values: Mapping[tuple[str, ...], float | None]
    labels: tuple[str, ...] = ()
    is_counter: bool = False


def gauge(name: str, words: str, value: float | None) -> MetricSample:
    return MetricSample(name, words, {(): value})


def counter(name: str, words: str, value: float | None) -> MetricSample:
    return MetricSample(name, words, {(): value}, is_counter=True)


def by_label(
    name: str, words: str, label: str, values: Mapping[str, float], *, is_counter: bool = False
) -> MetricSample:
    return MetricSample(
        name, words, {(key,): value for key, value in values.items()}, (label,), is_counter
    )


class CallbackCollector(Collector):
    """Calls `source()` at each scrape and exports its samples."""

    def __init__(self, source: Callable[[], Iterable[MetricSample]]) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for reading in self._source():
            kind = CounterMetricFamily if reading.is_counter else GaugeMetricFamily
            family = kind(PREFIX + reading.name, reading.words, labels=reading.labels)
            for labels, value in reading.values.items():
                if value is not None:
                    family.add_metric(labels, float(value))
            if family.samples:
                yield family

    def describe(self) -> list[Metric]:
        return []  # names are known only at the scrape


class ConstLabels(Collector):
    """Exports everything in `inner`, with these labels first."""

    def __init__(self, inner: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._inner, self._labels = inner, dict(labels)

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            metric.samples = [
                Sample(
                    sample.name,
                    {**self._labels, **sample.labels},
                    sample.value,
                    sample.timestamp,
                    sample.exemplar,
                )
                for sample in metric.samples
            ]
            yield metric

    def describe(self) -> list[Metric]:
        return []
