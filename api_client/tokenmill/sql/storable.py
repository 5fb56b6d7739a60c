"""Replaces what a database cannot store."""

from __future__ import annotations

from typing import Any, Final

MAX_INTEGER: Final = 2**63 - 1


def storable(value: Any) -> Any:
    """Return the value without NUL characters, lone surrogates, numbers beyond 64 bits, and floats
    that JSON does not have.
    """
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {storable(key): storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return MAX_INTEGER if value > 0 else -MAX_INTEGER
    if isinstance(value, float) and value - value != 0:  # NaN and infinities
        return None
    return value
