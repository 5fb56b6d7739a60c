"""Serves /metrics, /healthz, /readyz and /livez of one worker, on a small HTTP server in its event
loop.

/livez    503 when a restart is the remedy: the loop or the engine stands still. For liveness
probes. /healthz  503 when any check fails, a dependency that is away included. For people and
alerts. /readyz   503 also while it drains, which is no fault: does it take jobs now? For readiness
probes.

The health pages answer with JSON that names each check. Any answer shows that the event loop runs;
the checks must show that claims and steps are being made.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from tokenmill_worker.errors import PortTaken

_REQUEST_TIMEOUT_S: Final = 5.0
_MAX_REQUEST_BYTES: Final = 16_384
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One health check. `problem()` returns one sentence, or None when all is well. `vital`: a
    restart is the remedy. `ready`: the problem only means that no jobs are taken, for a good
    reason.
    """

    name: str
    problem: Callable[[], str | None]
    vital: bool = False
    ready: bool = False


@dataclass(slots=True)
class Watchdog:
    """Reports a problem when `reset()` has not been called for `limit_s`. `name`: what has to
    happen in time.
    """

    name: str
    limit_s: float
    clock: Callable[[], float] = time.monotonic
    last: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.last = self.clock()

    def reset(self) -> None:
        self.last = self.clock()

    def problem(self) -> str | None:
        silence = self.clock() - self.last
        return (
            f"no {self.name} for {silence:.0f} s (limit {self.limit_s:g} s)"
            if silence > self.limit_s
            else None
        )


class HealthServer:
    """Answers GET and HEAD, one request per connection."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, checks: Sequence[Check]
    ) -> None:
        self._host = host
        self._port = port
        self._registry = registry
        self._checks = tuple(checks)
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that is open, also if port 0 was asked for."""
        if self._server is None:
            raise RuntimeError("the server has not started")
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> Self:
        """Open the port. Raises PortTaken."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=_MAX_REQUEST_BYTES
            )
        except OSError as error:
            # asyncio's message repeats the address
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise PortTaken(
                f"/metrics cannot be served on {self._host}:{self._port}: {reason}"
            ) from error
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def report(self, path: str = "/healthz") -> tuple[bool, dict[str, str]]:
        """Return whether all checks of the page are well, and each check's state. A check that
        raises has failed.
        """
        states = {}
        for check in self._checks:
            if (path == "/livez" and not check.vital) or (path != "/readyz" and check.ready):
                continue
            try:
                problem = check.problem()
            except Exception as error:
                problem = f"the check itself failed: {error}"
            states[check.name] = problem or "ok"
        return all(state == "ok" for state in states.values()), states

    def answer(self, method: str, path: str) -> tuple[int, str, bytes]:
        """Return status, content type and body."""
        if method not in ("GET", "HEAD"):
            return 405, "text/plain", b"only GET\n"
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path in ("/healthz", "/readyz", "/livez"):
            is_well, states = self.report(path)
            body = (
                msgspec.json.encode({"status": "ok" if is_well else "failing", "checks": states})
                + b"\n"
            )
            return 200 if is_well else 503, "application/json", body
        return 404, "text/plain", b"here are /healthz, /readyz, /livez and /metrics\n"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError
        ):
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
                if len(words) != 3:
                    status, kind, body = 400, "text/plain", b"not HTTP\n"
                else:
                    status, kind, body = self.answer(words[0], words[1].split("?", 1)[0])
                writer.write(_head(status, kind, body) + (b"" if words[0] == "HEAD" else body))
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _head(status: int, kind: str, body: bytes) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
