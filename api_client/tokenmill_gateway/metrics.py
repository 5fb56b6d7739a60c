"""Counts what a gateway answers, for its /metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from tokenmill.errors import ConfigurationError

PREFIX: Final = "tokenmill:gateway_"
_SECONDS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120, 600)


class GatewayMetrics:
    """The metrics of one gateway, in a registry of its own."""

    def __init__(self, streams: Callable[[], int]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            f"{PREFIX}requests", "Requests by call and status.", ("call", "status"),
            registry=self.registry,
        )  # fmt: skip
        self._waits = Histogram(
            f"{PREFIX}status_seconds", "Time until a request had its status.", ("call",),
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.hung_up = Counter(
            f"{PREFIX}hung_up", "Answers whose client closed its connection before their end.",
            registry=self.registry,
        )  # fmt: skip
        gauge = Gauge(f"{PREFIX}streams", "Streams that are open.", registry=self.registry)
        gauge.set_function(streams)

    def answered(self, call: str, status: int, seconds: float) -> None:
        self._requests.labels(call, str(status)).inc()
        self._waits.labels(call).observe(seconds)

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Serve /metrics in a thread; return what ends it. Raises ConfigurationError."""
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            words = f"{host}:{port} cannot be listened on: {error.strerror}"
            raise ConfigurationError(words) from error

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return end
