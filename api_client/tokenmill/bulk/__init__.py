"""Bulk files in OpenAI's batch format: thousands or millions of requests in one file, their answers
in another.
"""

from tokenmill.bulk.batch import Batch, BatchState, Totals
from tokenmill.bulk.files import Paths
from tokenmill.bulk.outcome import cancel_batch, export_batch, refresh
from tokenmill.bulk.pacing import Pacing, Progress
from tokenmill.bulk.store import BatchNotFound, BatchStore, open_store
from tokenmill.bulk.work import Terms, import_batch, new_batch, run_batch

__all__ = [
    "Batch", "BatchNotFound", "BatchState", "BatchStore", "Pacing", "Paths", "Progress", "Terms", "Totals",
    "cancel_batch", "export_batch", "import_batch", "new_batch", "open_store", "refresh", "run_batch",
]  # fmt: skip
