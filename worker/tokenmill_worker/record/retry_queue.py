"""A queue that is processed in groups from its head, and retried without limit.

After a failure the group size halves, down to one. A single item that fails goes to the back. After
a success the size doubles again. So an item that breaks every group costs tries and does not block
the others, and a dependency that is down is probed with one item at growing intervals.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from tokenmill.transport.backoff import Backoff
from tokenmill.transport.repairs import reraise_cancellation, wait_at_most

T = TypeVar("T")


class RetryQueue(Generic[T]):
    """Processes its items with `work(group)`, which returns the items to try again one by one, or
    raises to have the whole group tried again.
    """

    def __init__(
        self,
        work: Callable[[list[T]], Awaitable[list[T]]],
        max_group: int,
        backoff: Backoff,
        *,
        on_failure: Callable[[Exception], None],
        can_wait: Callable[[T], bool] = lambda _: False,
        linger_s: float = 0.0,
        size_of: Callable[[T], int] = lambda _: 0,
        max_group_bytes: int = 0,
    ) -> None:
        """Create an empty queue. A group that is not full waits `linger_s` for more items, while
        every item in it `can_wait`. A group has at most `max_group_bytes` by `size_of`, or one
        item; 0: no limit.
        """
        self._work = work
        self._max_group = max_group
        self._backoff = backoff
        self._on_failure = on_failure
        self._waiting: deque[T] = deque()
        # items that `work` returned: tried again after a pause without others
        self._later: list[T] = []
        self._current: list[T] = []
        self._arrived = asyncio.Event()
        self._can_wait, self._linger_s = can_wait, linger_s
        self._size_of, self._max_group_bytes = size_of, max_group_bytes
        self.num_bytes = 0  # sum over all items
        self._is_awaited = False  # a caller waits for one of the waiting items

    def __len__(self) -> int:
        return len(self._waiting) + len(self._current) + len(self._later)

    @property
    def items(self) -> list[T]:
        return [*self._current, *self._waiting, *self._later]

    def put(self, items: Iterable[T]) -> None:
        for item in items:
            self._waiting.append(item)
            self.num_bytes += self._size_of(item)
            self._is_awaited = self._is_awaited or not self._can_wait(item)
        self._arrived.set()

    async def run(self) -> None:
        """Process groups until cancelled. Items of the group that was being processed then still
        count.
        """
        failures = 0
        size = self._max_group
        while True:
            await self._wait_for_items()
            await self._wait_for_more(size)
            self._current = self._next_group(size)
            self._is_awaited = self._is_awaited and bool(self._waiting)
            try:
                with reraise_cancellation():
                    again = await self._work(self._current)
            except Exception as error:
                failures += 1
                self._on_failure(error)
                size = self._put_back(size)
                await asyncio.sleep(self._backoff.delay_s(failures))
                continue
            failures = 0
            size = min(self._max_group, 2 * size)
            self.num_bytes += sum(map(self._size_of, again)) - sum(
                map(self._size_of, self._current)
            )
            self._current = []
            self._later.extend(again)

    def _next_group(self, size: int) -> list[T]:
        group: list[T] = []
        num_bytes = 0
        while self._waiting and len(group) < size:
            num_bytes += self._size_of(self._waiting[0])
            if group and 0 < self._max_group_bytes < num_bytes:
                break
            group.append(self._waiting.popleft())
        return group

    async def _wait_for_more(self, size: int) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._linger_s
        while (
            not self._is_awaited and len(self._waiting) < size and (left := until - loop.time()) > 0
        ):
            self._arrived.clear()
            await wait_at_most(self._arrived, left)

    def _put_back(self, size: int) -> int:
        """Return the failed group to the head of the queue; an item that failed alone goes to the
        back. Returns the next group's size.
        """
        group, self._current = self._current, []
        if len(group) == 1:
            self._waiting.extend(group)
        else:
            self._waiting.extendleft(reversed(group))
        return max(1, min(size, len(group)) // 2)

    async def _wait_for_items(self) -> None:
        while not self._waiting:
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._backoff.longest_s if self._later else None):
                    await self._arrived.wait()
            except TimeoutError:
                pass
            else:
                continue
            self._waiting.extend(self._later)
            self._later.clear()
