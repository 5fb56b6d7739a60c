"""Tells the time of the Redis server.

Every deadline and recorded time is the server's, so that the wall clocks of producers and workers
need not agree. The time is computed from readings of the server's clock and this machine's
monotonic clock, which no change of the wall clock moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster
from redis.exceptions import NoPermissionError

FRESH_S: Final = 60.0  # age of a reading after which clients read again
MAX_SKEW_S: Final = 1.0  # difference of the wall clock that people are told of
SLOW_NS: Final = 20_000_000  # a reply that takes longer gives a time that is too imprecise
_READINGS: Final = 4
_NS: Final = 1_000_000_000


class ServerClock:
    """The server's time. Before the first reading it is that of the wall clock `wall`; `monotonic`
    goes on while the process is frozen. Both are in nanoseconds.

    A reply that travels for long makes the server's time look earlier. So the latest of a few
    readings counts. Threads may share a clock: a reading replaces values, and changes none.
    """

    def __init__(
        self,
        wall: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._read_at: int | None = None  # by the monotonic clock
        self._drift_at_read = 0  # of the wall clock from the monotonic one
        self._offsets: Sequence[int] = ()  # of the last readings
        self._offset = wall() - monotonic()

    def note(self, server_ns: int) -> None:
        """Take a reading of the server's clock that has just arrived."""
        self._take([*self._offsets, server_ns - self._monotonic()][-_READINGS:])

    @property
    def is_fresh(self) -> bool:
        """Return whether the clock was read within FRESH_S. A wall clock that has moved against the
        monotonic one since then makes it stale: the machine may have been suspended.
        """
        if self._read_at is None:
            return False
        now = self._monotonic()
        drift = self._wall() - now - self._drift_at_read
        return now - self._read_at < FRESH_S * _NS and abs(drift) < MAX_SKEW_S * _NS

    @property
    def skew_s(self) -> float:
        """The lead of the wall clock over the server's."""
        return (self._wall() - self.now_ns()) / _NS

    def now_ns(self) -> int:
        return self._monotonic() + self._offset

    def now_ms(self) -> int:
        return self.now_ns() // 1_000_000

    def monotonic_s(self, moment_ms: int) -> float:
        """Return what `time.monotonic` shows at a moment of the server. All processes of this
        machine share that clock.
        """
        return (moment_ms * 1_000_000 - self._offset) / _NS

    def refresh(self, client: redis.Redis, key: str) -> int:
        """Return the time in Unix milliseconds, from a reading within FRESH_S. `key` selects the
        node of a cluster.
        """
        any_client: Any = client
        try:
            for note in self._readings():
                note(any_client.execute_command("TIME", **_node(any_client, key)))
        except NoPermissionError:
            self.keep()
        return self.now_ms()

    async def refresh_async(self, client: redis.asyncio.Redis, key: str) -> int:
        """Return the time from an event loop; see `refresh`."""
        any_client: Any = client
        try:
            for note in self._readings():
                if isinstance(any_client, redis.asyncio.cluster.RedisCluster):
                    await any_client.initialize()
                note(await any_client.execute_command("TIME", **_node(any_client, key)))
        except NoPermissionError:
            self.keep()
        return self.now_ms()

    def _readings(self) -> Iterator[Callable[[Any], None]]:
        """Yield, for each reading that is due, the function that takes the reply to TIME.

        After a reply that took long, as the first one of a connection does, another is due.
        """
        if self.is_fresh:
            return
        offsets: list[int] = []  # earlier ones do not count: the server may be another one by now
        for _ in range(_READINGS):
            asked_at = self._monotonic()
            yield lambda reply: offsets.append(_nanoseconds(reply) - self._monotonic())
            if self._monotonic() - asked_at < SLOW_NS:
                break
        self._take(offsets)

    def _take(self, offsets: Sequence[int]) -> None:
        """Take the readings that count from now on."""
        self._offsets = offsets
        self._offset = max(offsets)
        self._mark_read()

    def _mark_read(self) -> None:
        now = self._monotonic()
        self._drift_at_read = self._wall() - now
        self._read_at = now

    def keep(self) -> None:
        """Keep the time as it is, as fresh: the server is away, or an older list of users does not
        allow this user to ask. A clock that never had a reading follows the wall clock.
        """
        if not self._offsets:
            self._offset = self._wall() - self._monotonic()
        self._mark_read()


def _node(client: Any, key: str) -> dict[str, Any]:
    """Return the option that sends a command without keys to the key's node of a cluster."""
    is_cluster = isinstance(client, redis.cluster.RedisCluster | redis.asyncio.cluster.RedisCluster)
    return {"target_nodes": client.get_node_from_key(key)} if is_cluster else {}


def _nanoseconds(reply: Any) -> int:
    """Return the time in a reply to TIME."""
    if isinstance(reply, dict):  # a cluster's, by node
        (reply,) = reply.values()
    seconds, microseconds = reply
    return (int(seconds) * 1_000_000 + int(microseconds)) * 1_000
