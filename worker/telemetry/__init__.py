"""A worker's logs, metrics, traces and health pages. The parts that they report on do not appear
here.
"""

from worker.telemetry.health import Check, Pulse, WatchServer
from worker.telemetry.logs import configure_logging
from worker.telemetry.metrics import Metrics
from worker.telemetry.tracing import Tracing

__all__ = ["Check", "Metrics", "Pulse", "Tracing", "WatchServer", "configure_logging"]
