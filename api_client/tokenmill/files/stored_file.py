"""A file as its row describes it."""

from __future__ import annotations

import os

import msgspec

UPLOADING, READY, DELETED = "uploading", "ready", "deleted"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Times are Unix milliseconds."""

    id: str
    tenant: str
    state: str = UPLOADING
    purpose: str = ""
    name: str = ""
    bytes: int = 0
    lines: int = 0
    created_ms: int
    expires_ms: int | None = None

    def is_shown(self, tenant: str, now_ms: int) -> bool:
        """Return whether a tenant has this file now."""
        is_over = self.expires_ms is not None and self.expires_ms <= now_ms
        return self.tenant == tenant and self.state == READY and not is_over


def new_file_id() -> str:
    return f"file-{os.urandom(12).hex()}"
