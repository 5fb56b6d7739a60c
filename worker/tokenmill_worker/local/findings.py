"""Defines the finding of a check of `tokenmill doctor`."""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["ok", "warning", "error"]


class Finding(msgspec.Struct, frozen=True):
    """The result of a check. `hint` is the remedy."""

    subject: str
    severity: Severity
    words: str
    hint: str = ""
