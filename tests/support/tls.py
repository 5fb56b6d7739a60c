"""Makes certificates of a test's own authority, and TLS in front of a server that has none.

The Valkey of the wheel is built without TLS, so a front ends it, as stunnel or a load balancer
does; what is tested is our side of the wire. PostgreSQL speaks TLS itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import trustme

_CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Authority:
    """`ca_file` is what clients trust; it signs for any name."""

    ca: trustme.CA
    ca_file: Path

    @classmethod
    def found(cls, folder: Path, name: str = "ca") -> Authority:
        ca, path = trustme.CA(), folder / f"{name}.pem"
        ca.cert_pem.write_to_path(str(path))
        return cls(ca, path)

    def server_context(self, host: str = "127.0.0.1") -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(host).configure_cert(context)
        return context


@contextlib.asynccontextmanager
async def tls_front(port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Listen with TLS on a loopback port, pass everything on to `port`, and yield the new port."""
    links: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        links.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", port)
            there, back = _pass_on(reader, back_writer), _pass_on(back_reader, writer)
            await asyncio.gather(there, back)
        links.discard(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in list(links):
            task.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        await server.wait_closed()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
