"""What a worker shows of itself: log lines, metrics, its health. Nothing here knows the parts that it watches."""

from worker.telemetry.health import Check, Pulse, WatchServer
from worker.telemetry.logs import configure_logging
from worker.telemetry.metrics import Metrics

__all__ = ["Check", "Metrics", "Pulse", "WatchServer", "configure_logging"]
