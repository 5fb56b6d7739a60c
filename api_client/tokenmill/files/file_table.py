"""The rows of files in SQL.

A row is there before its object and goes after it, so that no object is without a row. Its states
are `uploading` and `ready`; a `deleted` file is hidden, and goes when no open batch reads it. Every
call is one transaction and may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from tokenmill.files.stored_file import DELETED, READY, UPLOADING, StoredFile
from tokenmill.sql.database import Database
from tokenmill_schemas.tables import batches, files

ABANDONED_MS: Final = 3 * 86_400_000  # an upload that has not ended by then never ends
_OVER: Final = ("completed", "failed", "expired", "cancelled")


class FileTable:
    """The files of one database; may be shared between threads."""

    def __init__(self, url: str) -> None:
        self._database = Database(url)

    def add(self, file: StoredFile) -> None:
        with self._database.connection() as connection:
            connection.execute(files.insert().values(msgspec.to_builtins(file)))

    def finish(self, file: StoredFile) -> None:
        """Describe a file whose object is complete, and show it."""
        values = msgspec.to_builtins(file) | {"state": READY}
        with self._database.connection() as connection:
            connection.execute(files.update().where(files.c.id == file.id).values(values))

    def find(self, file_id: str) -> StoredFile | None:
        found = self._read(_select().where(files.c.id == file_id))
        return found[0] if found else None

    def page(
        self,
        tenant: str,
        now_ms: int,
        *,
        limit: int,
        after: StoredFile | None = None,
        purpose: str | None = None,
        newest_first: bool = True,
    ) -> list[StoredFile]:
        """Return a tenant's files behind one of them, in the order of their creation."""
        live = sa.or_(files.c.expires_ms.is_(None), files.c.expires_ms > now_ms)
        wanted = _select().where(files.c.tenant == tenant, files.c.state == READY, live)
        if purpose is not None:
            wanted = wanted.where(files.c.purpose == purpose)
        place = sa.tuple_(files.c.created_ms, files.c.id)
        if after is not None:
            last = sa.tuple_(after.created_ms, after.id)
            wanted = wanted.where(place < last if newest_first else place > last)
        keys = (files.c.created_ms, files.c.id)
        order = [key.desc() for key in keys] if newest_first else list(keys)
        return self._read(wanted.order_by(*order).limit(limit))

    def delete(self, file_id: str) -> None:
        """Hide a file. `removable` names it when its object may go."""
        change = files.update().where(files.c.id == file_id).values(state=DELETED)
        with self._database.connection() as connection:
            connection.execute(change)

    def removable(self, now_ms: int, limit: int, file_id: str | None = None) -> list[str]:
        """Return the ids of deleted, expired and abandoned files that no open batch reads."""
        over = sa.or_(
            files.c.state == DELETED,
            files.c.expires_ms <= now_ms,
            sa.and_(files.c.state == UPLOADING, files.c.created_ms <= now_ms - ABANDONED_MS),
        )
        is_read = sa.exists().where(
            batches.c.input_file == files.c.id,
            batches.c.tenant == files.c.tenant,
            batches.c.state.not_in(_OVER),
        )
        found = sa.select(files.c.id).where(over, ~is_read).limit(limit)
        if file_id is not None:
            found = found.where(files.c.id == file_id)
        with self._database.connection() as connection:
            return list(connection.execute(found).scalars())

    def forget(self, file_id: str) -> None:
        with self._database.connection() as connection:
            connection.execute(files.delete().where(files.c.id == file_id))

    def _read(self, statement: Any) -> list[StoredFile]:
        with self._database.connection() as connection:
            rows: Sequence[Any] = connection.execute(statement).mappings().all()
        return [StoredFile(**row) for row in rows]

    def close(self) -> None:
        self._database.close()


def _select() -> Any:
    return sa.select(*(files.c[name] for name in StoredFile.__struct_fields__))
