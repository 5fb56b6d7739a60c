"""Queues of tenants: what waits is taken from one after the other."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueues(Generic[T]):
    """Waiting items by tenant, and the places that taken ones hold. Not thread-safe.

    Args:
        places: items that may be taken at once.
        places_each: those of one tenant; a place that it cannot hold is free for the others.
    """

    def __init__(self, places: int, places_each: int) -> None:
        self._places, self._places_each = places, places_each
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._held: Counter[str] = Counter()

    def add(self, tenant: str, item: T) -> None:
        self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> tuple[str, T] | None:
        """Take the item whose turn it is; None: nothing waits, or the places are taken. The place
        is held until `free`.
        """
        if self._held.total() >= self._places:
            return None
        free = (each for each in self._waiting if self._held[each] < self._places_each)
        tenant = next(free, None)
        if tenant is None:
            return None
        item = self._waiting[tenant].popleft()
        self._waiting.move_to_end(tenant)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._held[tenant] += 1
        return tenant, item

    def free(self, tenant: str) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
