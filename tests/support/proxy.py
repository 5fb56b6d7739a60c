"""A TCP proxy that misbehaves on request: between a client and a server it cuts, closes one half,
delays, freezes, loses bytes and passes them a few at a time.

Runs on an event loop in a thread of its own, so that it serves tests of any kind. It knows bytes,
not protocols: one Redis script call is one request and, on a quiet connection, one reply.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from tokenmill_worker.local.valkey_server import ManagedProcess

T = TypeVar("T")

_CHUNK_BYTES = 65_536
_TRICKLE_PIECES = 100  # a block arrives in at most so many pieces
_TRICKLE_PAUSE_S = 0.0005
_LINGER_RESET = struct.pack("ii", 1, 0)  # close sends RST


@dataclass(eq=False)
class _Link:
    """One client connection and the server connection behind it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    closed: set[asyncio.StreamWriter] = field(default_factory=set)  # have told the end of the data


class FaultProxy(ManagedProcess):
    """Listens on a loopback port of its own from `start` to `stop`; the address stays the same in
    between.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fault-proxy", daemon=True
        )
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._refuses = False
        self._delay_s = 0.0
        self._replies_to_lose = 0
        self._trickles = False
        self._loses_all = False
        self._open = asyncio.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection. With `refuse`, new ones are reset too until `heal`."""

        def change() -> None:
            self._refuses = refuse
            for link in list(self._links):
                self._reset(link)

        self._apply(change)

    def lead_to(self, port: int) -> None:
        """Lead new connections to another port; open ones stay where they are."""

        def change() -> None:
            self._target = (self._target[0], port)

        self._apply(change)

    def delay(self, seconds: float) -> None:
        """Hold back each piece of data, in both directions, for so long."""

        def change() -> None:
            self._delay_s = seconds

        self._apply(change)

    def freeze(self) -> None:
        """Freeze: connections are accepted and stay open, and no data passes, until `heal`."""
        self._apply(self._open.clear)

    def lose_replies(self, count: int = 1) -> None:
        """The next `count` pieces from the server are thrown away and their connection is reset:
        the server has acted, the client cannot know.
        """

        def change() -> None:
            self._replies_to_lose = count

        self._apply(change)

    def half_close(self, *, towards_client: bool) -> None:
        """End one direction of every connection: that side reads the end of the data, and may still
        send.
        """

        def change() -> None:
            for link in list(self._links):
                writer = link.client if towards_client else link.server
                link.closed.add(writer)
                writer.write_eof()

        self._apply(change)

    def trickle(self) -> None:
        """Pass all data a few bytes at a time, until `heal`."""

        def change() -> None:
            self._trickles = True

        self._apply(change)

    def lose_bytes(self) -> None:
        """Throw away all data, in both directions, until `heal` resets the connections: neither
        side knows what the other has received.
        """

        def change() -> None:
            self._loses_all = True

        self._apply(change)

    def heal(self) -> None:
        """End all faults; data held back by a freeze flows again."""

        def change() -> None:
            if self._loses_all:
                for link in list(self._links):
                    self._reset(link)
            self._refuses, self._delay_s, self._replies_to_lose = False, 0.0, 0
            self._trickles = self._loses_all = False
            self._open.set()

        self._apply(change)

    async def _listen(self) -> None:
        self._open.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            _abort(writer)
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _abort(writer)
            return
        link = _Link(writer, server_writer)
        self._links.add(link)
        link.tasks = [
            asyncio.create_task(self._pump(link, reader, server_writer, is_reply=False)),
            asyncio.create_task(self._pump(link, server_reader, writer, is_reply=True)),
        ]

    async def _pump(
        self,
        link: _Link,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        *,
        is_reply: bool,
    ) -> None:
        try:
            while data := await source.read(_CHUNK_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._open.wait()
                if is_reply and self._replies_to_lose > 0:
                    self._replies_to_lose -= 1
                    break
                if not self._loses_all and sink not in link.closed:
                    await self._pass_on(data, sink)
        except OSError:
            pass
        self._reset(link)

    async def _pass_on(self, data: bytes, sink: asyncio.StreamWriter) -> None:
        size = max(3, len(data) // _TRICKLE_PIECES) if self._trickles else len(data)
        for first in range(0, len(data), size):
            sink.write(data[first : first + size])
            await sink.drain()
            if self._trickles:
                await asyncio.sleep(_TRICKLE_PAUSE_S)

    def _reset(self, link: _Link) -> None:
        self._links.discard(link)
        for writer in (link.client, link.server):
            _abort(writer)
        for task in link.tasks:
            if task is not asyncio.current_task(self._loop):
                task.cancel()

    async def _close(self) -> None:
        assert self._server is not None, "close comes after listen"
        self._server.close()
        tasks = [task for link in self._links for task in link.tasks]
        for link in list(self._links):
            self._reset(link)
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the transports' closing callbacks

    def _apply(self, change: Callable[[], None]) -> None:
        async def run() -> None:
            change()

        self._call(run())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)


def _abort(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
    writer.transport.abort()
