"""Reads the replies of the scripts as values. All functions are pure and take bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

from tokenmill_schemas.codec import DecodeError, decode_status
from tokenmill_worker.jobs import Delivery

OUTCOMES: Final = frozenset({"run", "cancelled", "expired", "dead"})


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """`cancelled`: jobs that a user wants stopped. `lost`: jobs to drop, because another worker has
    them or will. `is_replaced`: a process that started later sends heartbeats under this worker's
    name.
    """

    cancelled: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    is_replaced: bool = False


def texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode("utf-8", "surrogateescape") for value in values]


def started_ms(status: bytes) -> int:
    """Return when the worker that wrote this status started, in Unix milliseconds; 0 if it cannot
    be decoded.
    """
    try:
        return decode_status(status).started_ms
    except DecodeError:
        return 0


def read_delivery(item: list[Any]) -> Delivery:
    """Read one claimed job. An unknown outcome (from a damaged state, say) counts as "dead". No
    text makes this raise.
    """
    (
        job_id,
        token,
        payload,
        deliveries,
        crashes,
        outcome,
        created,
        started,
        attempt,
        alone,
        log,
        redriven,
        log_end,
    ) = item
    word = outcome.decode("utf-8", "replace")
    return Delivery(
        job_id=job_id.decode("utf-8", "surrogateescape"),
        token=int(token),
        payload=payload,
        deliveries=int(deliveries),
        crashes=int(crashes),
        outcome=cast("Any", word if word in OUTCOMES else "dead"),
        log=tuple(log),
        created_ms=int(created),
        started_ms=int(started),
        attempt=int(attempt),
        alone=bool(alone),
        is_redriven=bool(redriven),
        log_end=int(log_end),
    )
