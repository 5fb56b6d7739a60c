"""Logs, metrics, traces and health pages, and the observers that collect them from the stages.

Belongs here: what an operator reads. No stage imports this room, and nothing here changes a job.
"""

from tokenmill_worker.telemetry.health import Check, HealthServer, Watchdog
from tokenmill_worker.telemetry.logs import configure_logging
from tokenmill_worker.telemetry.metrics import Metrics
from tokenmill_worker.telemetry.tracing import Tracing

__all__ = ["Check", "HealthServer", "Metrics", "Tracing", "Watchdog", "configure_logging"]
