"""Runs one gateway until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import resource
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, cast

import uvicorn
import uvloop

from tokenmill.errors import ConfigurationError
from tokenmill.operations.io_requests import ClientOptions
from tokenmill.sql.results import SqlResults
from tokenmill_gateway.app import application
from tokenmill_gateway.connection import Connection
from tokenmill_gateway.keys import KeyRing, KeyStore
from tokenmill_gateway.queues import Queues
from tokenmill_gateway.records import Records
from tokenmill_gateway.server import Server
from tokenmill_gateway.storage import Storage

log = logging.getLogger(__name__)
KEEP_ALIVE_S: Final = 75  # longer than a proxy keeps its connections to the gateway: 60
RESTART_S: Final = 1.0
MOST_UNSENT: Final = 128 * 1024  # bytes of a connection that wait in the kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    redis_url: str
    database_url: str
    key_prefix: str
    models: Mapping[str, str]
    host: str
    port: int
    is_open: bool
    key_secret: str
    answer_s: float
    drain_s: float
    write_s: float = 60.0
    processes: int = 1
    forwarded_allow_ips: str = "127.0.0.1"
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    files: str = ""
    upload_bytes: int = 200_000_000
    batch_lines: int = 50_000


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    _allow_connections()
    is_shared = settings.processes > 1
    with _bound(settings.host, settings.port, is_shared=is_shared) as listener:
        if is_shared:  # bound, so that the port is this gateway's; the processes listen
            return _run_processes(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, listener))
        return 0


def _run_processes(settings: GatewaySettings) -> int:
    """Run processes that share one port, until a signal. One that ends is started again."""
    context = multiprocessing.get_context("spawn")
    running: dict[int, BaseProcess] = {}
    is_ending = False

    def end(_number: int, _frame: object) -> None:
        nonlocal is_ending
        is_ending = True
        for process in running.values():
            process.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    while running or not is_ending:
        for place in range(settings.processes):
            if place not in running and not is_ending:
                running[place] = context.Process(target=_run_one, args=(settings, place))
                running[place].start()
        ended = wait([process.sentinel for process in running.values()], timeout=1.0)
        for place, process in list(running.items()):
            if process.sentinel in ended:
                process.join()
                del running[place]
                if not is_ending:
                    log.error("A gateway process has ended with status %s", process.exitcode)
                    time.sleep(RESTART_S)
    return 0


def _run_one(settings: GatewaySettings, place: int) -> None:
    metrics_port = settings.metrics_port
    if metrics_port is not None:
        settings = replace(settings, metrics_port=metrics_port + place)
    with (
        _bound(settings.host, settings.port, is_shared=True) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(serve(settings, listener))


def _allow_connections() -> None:
    """Allow as many open connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(
    settings: GatewaySettings, listener: socket.socket, ending: asyncio.Event | None = None
) -> None:
    """Serve on a socket until a signal, or until `ending` is set."""
    # of its connections too: else the kernel keeps 4 MB for a reader that takes nothing
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MOST_UNSENT)
    ring = None
    if not settings.is_open:
        ring = KeyRing(KeyStore(settings.database_url, settings.key_secret))
    storage = None
    if settings.files:
        most = (settings.upload_bytes, settings.batch_lines)
        storage = Storage.of(settings.files, settings.database_url, *most)
    server = Server(
        queues=Queues(
            settings.redis_url,
            settings.models,
            database=settings.database_url,
            prefix=settings.key_prefix,
            options=ClientOptions(),
        ),
        records=Records(settings.database_url),
        usage=SqlResults(settings.database_url),
        ring=ring,
        answer_s=settings.answer_s,
        storage=storage,
    )
    config = uvicorn.Config(
        application(server),
        http=cast("Any", partial(Connection, write_s=settings.write_s)),
        backlog=4_096,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        timeout_keep_alive=KEEP_ALIVE_S,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(settings.drain_s),
        lifespan="on",
        ws="none",
    )
    http = _Http(config, server, ending)
    with contextlib.ExitStack() as stack:
        if settings.metrics_port is not None:
            stack.callback(server.metrics.serve(settings.metrics_host, settings.metrics_port))
        await http.serve([listener])


class _Http(uvicorn.Server):
    """uvicorn, which ends at a signal or an event with the exit status 0."""

    def __init__(
        self, config: uvicorn.Config, server: Server, ending: asyncio.Event | None
    ) -> None:
        super().__init__(config)
        self._server = server
        self._ending = ending

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Wait for the end in the block. uvicorn's own would end the process by the signal."""
        loop = asyncio.get_running_loop()
        if self._ending is not None:
            waiting = loop.create_task(self._end_at(self._ending))
            try:
                yield
            finally:
                waiting.cancel()
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _end(self, number: int) -> None:
        self._server.drain()
        self.handle_exit(number, None)

    async def _end_at(self, ending: asyncio.Event) -> None:
        await ending.wait()
        self._end(signal.SIGTERM)


@contextlib.contextmanager
def _bound(host: str, port: int, *, is_shared: bool = False) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            words = f"{host}:{port} cannot be listened on: {error.strerror}"
            raise ConfigurationError(words) from error
        yield listener
