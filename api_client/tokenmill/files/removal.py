"""Removes files that nobody sees any more: the object first, then the row."""

from __future__ import annotations

from typing import Final

from tokenmill.files.file_table import FileTable
from tokenmill.files.object_store import ObjectStore

PAGE: Final = 200


def remove_old(table: FileTable, objects: ObjectStore, now_ms: int, file_id: str = "") -> int:
    """Remove the deleted, expired and abandoned files that no open batch reads, or the one with an
    id; at most PAGE. Return their number.
    """
    found = table.removable(now_ms, PAGE, file_id or None)
    for each in found:
        objects.remove(each)
        table.forget(each)
    return len(found)
