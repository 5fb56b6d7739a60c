"""Bulk files in OpenAI's batch format: thousands or millions of requests in one file, their answers
in another.

Belongs here: how lines become jobs and ended jobs become lines. Single jobs belong to `operations`.
"""

from tokenmill.bulk.batch import Batch, BatchNotFound, BatchState, Totals
from tokenmill.bulk.formats.output_files import Paths
from tokenmill.bulk.lifecycle import cancel_batch, export_batch, refresh
from tokenmill.bulk.progress import BatchProgress, RunLimits
from tokenmill.bulk.run import BatchOptions, import_batch, new_batch, run_batch
from tokenmill.bulk.store import BatchStore, open_store

__all__ = [
    "Batch", "BatchNotFound", "BatchOptions", "BatchProgress", "BatchState", "BatchStore", "Paths",
    "RunLimits", "Totals", "cancel_batch", "export_batch", "import_batch", "new_batch",
    "open_store", "refresh", "run_batch",
]  # fmt: skip
