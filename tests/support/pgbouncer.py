"""PgBouncer in transaction mode before a PostgreSQL server: each transaction may run in another
session.
"""

import os
import shutil
import signal
import socket
import time
from typing import Self

from tests.support.postgres import PostgresServer, ordinary_user
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.system.private_directory import private_directory

_START_TIMEOUT_S = 20.0
_PLACES = os.pathsep.join((os.defpath, "/usr/sbin", "/usr/local/sbin", "/usr/local/bin"))


def pgbouncer_binary() -> str | None:
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path=_PLACES)


class PgBouncer:
    """One pooler on a loopback port, with few sessions for any number of connections."""

    def __init__(self, server: PostgresServer, binary: str, num_sessions: int = 3) -> None:
        self.port = free_port()
        self.directory = private_directory("pgbouncer")
        self.directory.chmod(0o755)
        self._command = [binary, str(self.directory / "pgbouncer.ini")]
        (self.directory / "pgbouncer.ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port} user=tokenmill\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = transaction\ndefault_pool_size = {num_sessions}\n"
        )
        self._child: GuardedProcess | None = None

    def url(self, database_url: str) -> str:
        """Return the URL of the same database behind the pooler."""
        name = database_url.rsplit("/", 1)[1]
        return f"postgresql://tokenmill@127.0.0.1:{self.port}/{name}"

    def start(self) -> Self:
        self._child = GuardedProcess(
            self._command, at_death=signal.SIGKILL, uid=ordinary_user(), cwd=self.directory
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._child.is_alive and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                time.sleep(0.02)
            else:
                return self
        self.stop()
        raise RuntimeError("PgBouncer did not start")

    def stop(self) -> None:
        if self._child is not None:
            self._child.end(signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)
