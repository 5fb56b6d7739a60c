"""What a worker shows of itself: log, metrics, traces, health. Nothing here knows the parts that it watches."""

from worker.telemetry.health import Check, Pulse, WatchServer
from worker.telemetry.logs import configure_logging
from worker.telemetry.metrics import Metrics
from worker.telemetry.tracing import Tracing

__all__ = ["Check", "Metrics", "Pulse", "Tracing", "WatchServer", "configure_logging"]
