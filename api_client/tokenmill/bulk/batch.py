"""A batch: a bulk file that a queue processes, as it is stored in SQL, and as OpenAI's API
shows it.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed
        │              │ ├── completion window over ─▶ expired
        ▼              │ │
      failed           └─┴── cancel ─▶ cancelling ─▶ cancelled

Times are Unix milliseconds; 0 means not yet.
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from typing import Final

import msgspec

from tokenmill.errors import ConfigurationError, TokenmillError
from tokenmill_schemas.openai import ReasoningDetails
from tokenmill_schemas.openai_batch import (
    BatchError,
    BatchErrors,
    BatchObject,
    BatchUsage,
    CachedDetails,
    RequestCounts,
)

_WINDOW = re.compile(r"([1-9][0-9]{0,5})\s*([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DEFAULT_WINDOW: Final = "24h"
HOSTED: Final = "file-"  # the begin of the input of a batch of the gateway


class BatchNotFound(TokenmillError, LookupError):
    def __init__(self, batch_id: str) -> None:
        super().__init__(batch_id)
        self.batch_id = batch_id

    def __str__(self) -> str:
        return f"no batch {self.batch_id}: it was never submitted here, or its record has expired"


class BatchState(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (
            BatchState.COMPLETED,
            BatchState.FAILED,
            BatchState.EXPIRED,
            BatchState.CANCELLED,
        )


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and tokens of a batch's lines so far. `failed` counts every line that ended without an
    answer.
    """

    completed: int = 0
    failed: int = 0
    expired: int = 0  # included in `failed`
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0  # included in `output_tokens`

    @property
    def ended(self) -> int:
        return self.completed + self.failed

    def plus(self, other: Totals) -> Totals:
        return Totals(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch and its progress.

    `submitted`: number of the last line that was submitted or answered. `over_line`: all lines up
    to this one have ended. `seen_ms`: when a process last submitted lines. `digest`: hash of the
    input file, so that no run continues with another file.
    """

    id: str
    queue: str
    state: BatchState = BatchState.VALIDATING
    tenant: str = ""
    model: str = ""
    endpoint: str = ""
    any_model: bool = False
    input_file: str = ""
    output_file: str | None = None
    error_file: str | None = None
    completion_window: str = DEFAULT_WINDOW
    metadata: dict[str, str] = {}
    errors: tuple[BatchError, ...] = ()
    total: int = 0
    last_line: int = 0
    digest: str = ""
    submitted: int = 0
    over_line: int = 0
    seen_ms: int = 0
    output_expires_s: int | None = None  # of the files with its answers, after their creation
    totals: Totals = Totals()
    created_ms: int = 0
    started_ms: int = 0
    finalizing_ms: int = 0
    cancelling_ms: int = 0
    finished_ms: int = 0
    expires_ms: int = 0

    @property
    def is_hosted(self) -> bool:
        """Return whether its files are those of the gateway, and `tokenmill tasks` runs it."""
        return self.input_file.startswith(HOSTED)

    @property
    def is_submitted(self) -> bool:
        return bool(self.last_line) and self.submitted >= self.last_line

    def public(self) -> BatchObject:
        """Return the batch in the form of OpenAI's API."""
        used, state = self.totals, self.state
        usage = BatchUsage(
            input_tokens=used.input_tokens,
            output_tokens=used.output_tokens,
            total_tokens=used.input_tokens + used.output_tokens,
            input_tokens_details=CachedDetails(used.cached_tokens),
            output_tokens_details=ReasoningDetails(used.reasoning_tokens),
        )
        ended = {
            name: _second(self.finished_ms) if state is BatchState(name) else None for name in _ENDS
        }
        return BatchObject(
            id=self.id,
            endpoint=self.endpoint or "/v1/chat/completions",
            model=self.model or None,
            errors=BatchErrors(list(self.errors)) if self.errors else None,
            input_file_id=self.input_file,
            completion_window=self.completion_window,
            status=state.value,
            output_file_id=self.output_file,
            error_file_id=self.error_file,
            created_at=self.created_ms // 1000,
            in_progress_at=_second(self.started_ms),
            expires_at=_second(self.expires_ms),
            finalizing_at=_second(self.finalizing_ms),
            completed_at=ended["completed"],
            failed_at=ended["failed"],
            expired_at=ended["expired"],
            cancelling_at=_second(self.cancelling_ms),
            cancelled_at=ended["cancelled"],
            request_counts=RequestCounts(self.total, used.completed, used.failed),
            usage=usage if used.ended else None,
            metadata=self.metadata or None,
        )


_ENDS: Final = ("completed", "failed", "expired", "cancelled")


def _second(moment_ms: int) -> int | None:
    return moment_ms // 1000 if moment_ms else None


def new_batch_id() -> str:
    return f"batch_{os.urandom(12).hex()}"


def window_ms(text: str) -> int:
    """Parse a completion window such as `24h`, `30m` or `7d`. Raises ConfigurationError."""
    match = _WINDOW.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"a completion window is a number with s, m, h or d, as 24h, not {text!r}"
        )
    return int(match[1]) * _SECONDS[match[2]] * 1000


def check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """Return the metadata if it keeps OpenAI's limits. Raises ConfigurationError."""
    if len(metadata) > 16:
        raise ConfigurationError(f"a batch may have 16 entries of metadata, not {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise ConfigurationError("metadata: keys may have 64 characters, values 512")
    return metadata
