"""A worker's logs, metrics, traces and health pages. The parts that they report on do not appear
here.
"""

from tokenmill_worker.telemetry.health import Check, Pulse, WatchServer
from tokenmill_worker.telemetry.logs import configure_logging
from tokenmill_worker.telemetry.metrics import Metrics
from tokenmill_worker.telemetry.tracing import Tracing

__all__ = ["Check", "Metrics", "Pulse", "Tracing", "WatchServer", "configure_logging"]
