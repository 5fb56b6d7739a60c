"""Faults of Valkey and PostgreSQL, and of the connections to them: kills, restarts, freezes, full
disks; resets, half-closed connections, delays, lost bytes.

Each fault is a coroutine that leaves the servers able to work again. What ends it needs no thread:
the clients' look-ups may hold all threads of the event loop until the fault ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import redis

from tests.support.postgres import PostgresServer
from tests.support.proxy import FaultProxy
from tests.support.small_disk import SmallDisk
from tests.support.valkey import ControlledValkey

START_S = 30.0


@dataclass(slots=True)
class ServerFaults:
    """`survived` counts the faults. `disks` are by the server's name; none: no disk gets full."""

    valkey: ControlledValkey
    postgres: PostgresServer
    chance: random.Random
    survived: Counter[str]
    longest_s: float  # for which a server is frozen
    disks: dict[str, SmallDisk] = field(default_factory=dict)
    _valkey_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _postgres_turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def all(self) -> list[Callable[[], Awaitable[None]]]:
        full = [self.fill_valkey, self.fill_postgres] if self.disks else []
        return [
            self.cut_connections, self.crash_valkey, self.restart_valkey, self.freeze_valkey,
            self.crash_postgres, self.restart_postgres, self.cut_postgres, self.freeze_postgres,
            *full,
        ]  # fmt: skip

    # ── Valkey ──

    async def cut_connections(self) -> None:
        def cut() -> None:
            with contextlib.suppress(redis.RedisError), self.valkey.client() as client:
                for kind in ("normal", "pubsub"):
                    client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

        await asyncio.to_thread(cut)
        self.survived["all connections to Valkey cut"] += 1

    async def _restart_valkey(self, number: int, what: str) -> None:
        async with self._valkey_turn:
            await asyncio.to_thread(self.valkey.halt, number)
            await asyncio.sleep(self.chance.choice([0.0, 0.5, 2.0]))
            await asyncio.to_thread(self.valkey.start)
            self.survived[what] += 1

    async def crash_valkey(self) -> None:
        await self._restart_valkey(signal.SIGKILL, "Valkey killed")

    async def restart_valkey(self) -> None:
        await self._restart_valkey(signal.SIGTERM, "Valkey restarted")

    async def freeze_valkey(self) -> None:
        async with self._valkey_turn:
            self.valkey.freeze()
            await asyncio.sleep(self.chance.uniform(0.3, self.longest_s))
            self.valkey.thaw()
            self.survived["Valkey frozen"] += 1

    async def fill_valkey(self) -> None:
        """Fill the disk of the AOF. A server that writes it always ends; it is started again."""
        async with self._valkey_turn, self._full("valkey"):
            await asyncio.sleep(self.chance.uniform(0.5, 2.0))
        async with self._valkey_turn:
            await asyncio.to_thread(self.valkey.start)
            self.survived["Valkey's disk full"] += 1

    # ── PostgreSQL ──

    async def _restart_postgres(self, number: int, what: str) -> None:
        async with self._postgres_turn:
            await asyncio.to_thread(self.postgres.halt, number)
            await asyncio.sleep(self.chance.choice([0.0, 0.5, 3.0]))
            await asyncio.to_thread(self._start_postgres)
            self.survived[what] += 1

    def _start_postgres(self) -> None:
        """Start the server. After SIGKILL its children hold the data folder for a moment, so the
        start is retried.
        """
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.postgres.start()
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)
            else:
                return

    async def crash_postgres(self) -> None:
        await self._restart_postgres(signal.SIGKILL, "PostgreSQL killed")

    async def restart_postgres(self) -> None:
        await self._restart_postgres(signal.SIGINT, "PostgreSQL restarted")

    async def freeze_postgres(self) -> None:
        async with self._postgres_turn:
            await asyncio.to_thread(self.postgres.freeze)
            await asyncio.sleep(self.chance.uniform(0.3, self.longest_s))
            self.postgres.thaw()
            self.survived["PostgreSQL frozen"] += 1

    async def cut_postgres(self) -> None:
        async with self._postgres_turn:
            others = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
                "pg_backend_pid()"
            )
            await asyncio.to_thread(self.postgres.execute, others)
            self.survived["all connections to PostgreSQL cut"] += 1

    async def fill_postgres(self) -> None:
        """Fill the disk of the database. A server that cannot write its log ends, and is started
        again.
        """
        async with self._postgres_turn, self._full("postgres"):
            await asyncio.sleep(self.chance.uniform(0.5, 2.0))
        async with self._postgres_turn:
            await asyncio.to_thread(self._start_postgres)
            self.survived["PostgreSQL's disk full"] += 1

    @contextlib.asynccontextmanager
    async def _full(self, name: str) -> AsyncIterator[None]:
        disk = self.disks[name]
        await asyncio.to_thread(disk.fill)
        try:
            yield
        finally:
            disk.free()


@dataclass(slots=True)
class NetworkFaults:
    """Faults of one proxy at a time. `proxies` are by the names of those whom they connect."""

    proxies: dict[str, FaultProxy]
    chance: random.Random
    survived: Counter[str]

    @property
    def all(self) -> list[Callable[[], Awaitable[None]]]:
        return [self.reset, self.half_close, self.delay, self.lose_bytes, self.trickle]

    def _pick(self, what: str) -> FaultProxy:
        name = self.chance.choice(sorted(self.proxies))
        self.survived[f"{what} ({name})"] += 1
        return self.proxies[name]

    async def _for_a_while(self, proxy: FaultProxy, begin: Callable[[], None]) -> None:
        await asyncio.to_thread(begin)
        await asyncio.sleep(self.chance.uniform(0.2, 2.0))
        proxy.heal()

    async def reset(self) -> None:
        await asyncio.to_thread(self._pick("connections reset").cut)

    async def half_close(self) -> None:
        proxy, towards_client = self._pick("connections half closed"), self.chance.random() < 0.5
        await asyncio.to_thread(proxy.half_close, towards_client=towards_client)

    async def delay(self) -> None:
        proxy, seconds = self._pick("data delayed"), self.chance.uniform(0.02, 0.3)
        await self._for_a_while(proxy, lambda: proxy.delay(seconds))

    async def lose_bytes(self) -> None:
        proxy = self._pick("bytes in flight lost")
        await self._for_a_while(proxy, proxy.lose_bytes)

    async def trickle(self) -> None:
        proxy = self._pick("a few bytes at a time")
        await self._for_a_while(proxy, proxy.trickle)
