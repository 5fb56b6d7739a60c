"""Bulk files in OpenAI's batch format: thousands or millions of requests in one file, their answers
in another.
"""

from api_client.bulk.batch import Batch, BatchState, Totals
from api_client.bulk.files import Paths
from api_client.bulk.outcome import cancel_batch, export_batch, refresh
from api_client.bulk.pacing import Pacing, Progress
from api_client.bulk.store import BatchNotFound, BatchStore, open_store
from api_client.bulk.work import Terms, import_batch, new_batch, run_batch

__all__ = [
    "Batch", "BatchNotFound", "BatchState", "BatchStore", "Pacing", "Paths", "Progress", "Terms", "Totals",
    "cancel_batch", "export_batch", "import_batch", "new_batch", "open_store", "refresh", "run_batch",
]  # fmt: skip
