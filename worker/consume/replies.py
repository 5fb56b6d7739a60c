"""What the scripts answer, as values. Pure functions over bytes; it knows no connection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from worker.jobs import Delivery


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """`cancelled`: a user wants them stopped. `lost`: drop them, another worker has them or will."""

    cancelled: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode("utf-8", "surrogateescape") for value in values]


def read_delivery(item: list[Any]) -> Delivery:
    job_id, token, payload, deliveries, crashes, verdict, created, started, attempt, alone, log = item
    return Delivery(
        job_id=job_id.decode("utf-8", "surrogateescape"),
        token=int(token),
        payload=payload,
        deliveries=int(deliveries),
        crashes=int(crashes),
        verdict=verdict.decode(),
        log=tuple(log),
        created_ms=int(created),
        started_ms=int(started),
        attempt=int(attempt),
        alone=bool(alone),
    )
