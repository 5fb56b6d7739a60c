"""The gateway of `tokenmill dev`: a process of its own, and a first key, which stays in a file."""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.settings import Settings, child_environment

USUAL_PORT: Final = 8080
TENANT: Final = "dev"
_DRAIN_S: Final = 5


def is_installed() -> bool:
    """Return whether the extra of the gateway is there."""
    return all(find_spec(name) is not None for name in ("starlette", "uvicorn", "uvloop"))


def first_key(database_url: str, path: Path) -> str:
    """Return the key in a file; write a new one there if it opens nothing."""
    from tokenmill_gateway.keys import KeyStore

    with closing(KeyStore(database_url, "")) as store:
        text = path.read_text(encoding="ascii").strip() if path.exists() else ""
        if not store.opens(text):
            _, text = store.create(TENANT, label="tokenmill dev")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(text, encoding="ascii")
    return text


class LocalGateway:
    """A gateway before the service of these settings, on the usual port or any other that is
    free.
    """

    def __init__(self, settings: Settings) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}/v1"
        options = ["--port", str(port), "--drain-seconds", str(_DRAIN_S)]
        self._command = [sys.executable, "-m", "tokenmill.cli", "gateway", *options]
        self._environment = child_environment(settings)
        self.start()

    def start(self) -> None:
        self._process = GuardedProcess(self._command, env=self._environment, output=None)

    @property
    def exit_status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.process.poll()

    def end(self) -> None:
        self._process.end(signal.SIGTERM, 2 * _DRAIN_S)


def _free_port() -> int:
    for port in (USUAL_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no port of 127.0.0.1 is free")
