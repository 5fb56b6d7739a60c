"""Holds the files and batches of a gateway, and finds those of a tenant."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Final

from tokenmill.bulk.batch import Batch, BatchNotFound
from tokenmill.bulk.store import BatchStore
from tokenmill.files.file_table import FileTable
from tokenmill.files.object_store import ObjectStore
from tokenmill.files.stored_file import StoredFile
from tokenmill.transport.server_clock import ServerClock
from tokenmill_gateway.keys import ApiKey
from tokenmill_gateway.queues import not_found
from tokenmill_gateway.threads import in_thread

_ID: Final = re.compile(r"(file-|batch_)[0-9a-f]{24}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Storage:
    """The files and batches that are kept, and the most that one file may have."""

    objects: ObjectStore
    files: FileTable
    batches: BatchStore
    most_bytes: int
    most_lines: int

    @classmethod
    def of(cls, url: str, database_url: str, most_bytes: int, most_lines: int) -> Storage:
        """Open a store and a database. Raises ConfigurationError."""
        return cls(
            ObjectStore(url),
            FileTable(database_url),
            BatchStore(database_url, ServerClock()),
            most_bytes,
            most_lines,
        )

    async def file(self, key: ApiKey, file_id: str) -> StoredFile:
        """Return a file of a key's tenant. Raises HttpRefusal, in the same words for another's."""
        if _ID.fullmatch(file_id) is None:
            raise not_found(file_id)
        found = await in_thread(lambda: self.files.find(file_id))
        if found is None or not found.is_shown(key.tenant, now_ms()):
            raise not_found(file_id)
        return found

    async def batch(self, key: ApiKey, batch_id: str) -> Batch:
        """Return a batch of a key's tenant. Raises HttpRefusal, in the same words for another's."""
        if _ID.fullmatch(batch_id) is None:
            raise not_found(batch_id)
        try:
            found = await in_thread(lambda: self.batches.get(batch_id))
        except BatchNotFound:
            raise not_found(batch_id) from None
        if found.tenant != key.tenant or not found.is_hosted:
            raise not_found(batch_id)
        return found

    def close(self) -> None:
        self.files.close()
        self.batches.close()


def now_ms() -> int:
    return time.time_ns() // 1_000_000
