"""Parses times as people type them: `2h` (ago), `7d`, `2026-01-31`, `2026-01-31T12:30`, with or
without a zone.
"""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Final

from tokenmill.errors import ConfigurationError

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def moment_ms(text: str | None) -> int | None:
    """Return a time in Unix milliseconds; None without a text. A time without a zone is local.
    Raises ConfigurationError.
    """
    if text is None:
        return None
    span = re.fullmatch(r"(\d{1,9})([smhdw])", text.strip())
    if span is not None:
        return round((time.time() - int(span[1]) * _UNITS_S[span[2]]) * 1000)
    try:
        return round(datetime.fromisoformat(text.strip()).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise ConfigurationError(
            f"a moment is written 2026-01-31, 2026-01-31T12:30, or 2h for two hours ago, not {text!r}"
        ) from None
