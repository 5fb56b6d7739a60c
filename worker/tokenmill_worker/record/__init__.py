"""Records finished jobs in SQL, and keeps the order in which a job ends: commit first, then
acknowledge.

Belongs here: what writes a job's rows, the schema's version and its migration. Reading results for
producers belongs to `tokenmill.sql`.
"""

from tokenmill_worker.record.finalizer import Finalizer, FinalizerLimits, FinalizerStats
from tokenmill_worker.record.result_store import RecordReport, ResultStore

__all__ = ["Finalizer", "FinalizerLimits", "FinalizerStats", "RecordReport", "ResultStore"]
