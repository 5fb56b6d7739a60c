"""The record of finished jobs in SQL, and the order in which a job ends: committed, then acknowledged."""

from worker.record.finalizer import Finalizer, FinalizerLimits, FinalizerStats
from worker.record.store import RecordReport, ResultStore

__all__ = ["Finalizer", "FinalizerLimits", "FinalizerStats", "RecordReport", "ResultStore"]
