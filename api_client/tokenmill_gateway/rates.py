"""The limits of tenants: a queue has those that were set for every queue, and a tenant with a rate
is told how much of it is left, in the headers `x-ratelimit-…`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Final

import redis.asyncio

from tokenmill.transport.refusals import TRANSLATED
from tokenmill_schemas.keys import Keys, tenant_limits

_REMEMBERED_S: Final = 10.0
_MOST_REMEMBERED: Final = 10_000
LIMITS: Final = ("rate", "burst", "concurrency", "weight")


class Rates:
    """Reads the rate of a tenant in a queue, which it remembers for a while, and its bucket."""

    def __init__(self, connection: redis.asyncio.Redis, prefix: str) -> None:
        self._redis: Any = connection
        self._prefix = prefix
        self._applied: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._known: OrderedDict[tuple[str, str], tuple[float, float, float]] = OrderedDict()

    async def apply(self, queue: str, tenant: str) -> None:
        """Give a queue a tenant's limits of every queue, as far as it has none of its own. The
        server is asked once in a while. Raises redis-py's errors.
        """
        place, now = (queue, tenant), time.monotonic()
        if self._applied.get(place, 0.0) > now:
            return
        names = [f"{name}:{whose}" for name in LIMITS for whose in (tenant, "*")]
        found = await self._redis.hmget(tenant_limits(self._prefix), names)
        for name, value in zip(names, found, strict=True):
            if value is not None:
                await self._redis.hsetnx(Keys(queue, self._prefix).meta, name, value)
        self._applied[place] = now + _REMEMBERED_S
        self._applied.move_to_end(place)
        if len(self._applied) > _MOST_REMEMBERED:
            self._applied.popitem(last=False)

    async def headers(self, queue: str, tenant: str) -> dict[str, str]:
        """Return the headers; none without a rate, and none while the server is away."""
        keys = Keys(queue, self._prefix)
        try:
            rate, burst = await self._settings(keys, tenant)
            if rate <= 0:
                return {}
            (filled,) = await self._redis.hmget(keys.tenant(tenant), "bucket")
        except (*TRANSLATED, ValueError):
            return {}
        left = min(burst, float(filled or burst))
        return {
            "x-ratelimit-limit-requests": f"{burst:g}",
            "x-ratelimit-remaining-requests": str(max(0, int(left))),
            "x-ratelimit-reset-requests": f"{(burst - left) / rate:.3f}s",
        }

    async def _settings(self, keys: Keys, tenant: str) -> tuple[float, float]:
        """Return the rate and the burst; a tenant without its own has those of `*`."""
        place, now = (keys.queue, tenant), time.monotonic()
        until, rate, burst = self._known.get(place, (0.0, 0.0, 0.0))
        if until <= now:
            names = [f"{name}:{whose}" for name in ("rate", "burst") for whose in (tenant, "*")]
            found = await self._redis.hmget(keys.meta, names)
            own_rate, any_rate, own_burst, any_burst = found
            rate = float(any_rate or 0 if own_rate is None else own_rate)
            burst = max(1.0, float(any_burst or 0 if own_burst is None else own_burst))
            self._known[place] = (now + _REMEMBERED_S, rate, burst)
            self._known.move_to_end(place)
            if len(self._known) > _MOST_REMEMBERED:
                self._known.popitem(last=False)
        return rate, burst
