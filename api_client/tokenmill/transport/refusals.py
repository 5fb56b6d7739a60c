"""Recognises a server that answers but takes no writes, and says why in one sentence."""

from __future__ import annotations

from redis.exceptions import OutOfMemoryError, ResponseError

from tokenmill.transport.repairs import is_readonly_error

_BY_CODE = {
    "MISCONF": "it cannot save its data (MISCONF)",
    "NOREPLICAS": "too few replicas are in step (NOREPLICAS)",
}


def write_refusal(error: BaseException) -> str | None:
    """Return why the server refuses writes; None if the error says something else."""
    for one in (error, error.__cause__):
        if not isinstance(one, ResponseError):
            continue
        reason = _BY_CODE.get(str(one).partition(" ")[0])
        if isinstance(one, OutOfMemoryError):
            reason = "used memory > 'maxmemory'"
        elif is_readonly_error(one):
            reason = "it is a read-only replica"
        if reason is not None:
            return f"Redis refuses writes: {reason}"
    return None
