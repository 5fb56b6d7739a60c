"""Opens the SQL store (URL forms, SQLite's write-ahead log, PostgreSQL's timeouts), and runs
blocking calls with a time limit.

Drivers block, so calls run in threads. A call that takes too long is abandoned with its thread, so
a frozen server costs a thread and not the worker. If an abandoned call commits late, that is
harmless: inserts ignore rows that exist.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import DisconnectionError

from tokenmill_worker.errors import StoreUnavailable, TokenmillError

T = TypeVar("T")

LOCK_TIMEOUT_S: Final = 10
STATEMENT_TIMEOUT_S: Final = 30


def normalised(url: str) -> URL:
    """Parse a URL; `postgres://` and `postgresql://` select psycopg 3."""
    parsed = make_url(url)
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    return parsed


def sqlite_file(url: str) -> Path | None:
    """Return the absolute path of this URL's SQLite file; None for another database."""
    parsed = normalised(url)
    if (
        parsed.get_backend_name() != "sqlite"
        or not parsed.database
        or parsed.database.startswith((":", "file:"))
    ):
        return None
    return Path(parsed.database).expanduser().absolute()


def missing_file(url: str) -> Path | None:
    """Return the path of this URL's SQLite file if the file does not exist; else None."""
    path = sqlite_file(url)
    return None if path is None or path.exists() else path


def open_engine(url: str, *, pool_size: int = 2, may_create: bool = False) -> Engine:
    """Create an engine that connects lazily; raises only for a URL that makes no sense.

    `pool_size`: connections to PostgreSQL. `may_create`: create an SQLite file that does not exist;
    without it, a missing file is an error.
    """
    parsed = normalised(url)
    if parsed.get_backend_name() == "sqlite":
        return _open_sqlite(parsed, may_create)
    if parsed.get_backend_name() != "postgresql":
        raise ValueError(
            f"the SQL store must be SQLite or PostgreSQL, not {parsed.get_backend_name()}"
        )
    arguments: dict[str, Any] = {
        "connect_timeout": 5,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "application_name": "tokenmill",
        "prepare_threshold": None,  # poolers in transaction mode lose prepared statements
    }
    arguments = {name: value for name, value in arguments.items() if name not in parsed.query}
    pool: dict[str, Any] = {"pool_size": pool_size, "max_overflow": 4, "pool_pre_ping": True}
    return create_engine(parsed, connect_args=arguments, hide_parameters=True, **pool)


def _open_sqlite(url: URL, may_create: bool) -> Engine:
    options: dict[str, Any] = {"connect_args": {"timeout": LOCK_TIMEOUT_S}}
    path = None
    if url.database and not url.database.startswith((":", "file:")):
        path = Path(url.database).expanduser().absolute()
        url = url.set(database=str(path))
        if may_create:
            _make_folder(path.parent)
        options = {"creator": lambda: _connect(path, may_create)}
    engine = create_engine(url, hide_parameters=True, **options)
    if path is not None:
        _leave_removed_file(engine, path)

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(
            f"PRAGMA busy_timeout = {LOCK_TIMEOUT_S * 1000}"
        )  # first: the next one may wait for a lock
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(
            "PRAGMA synchronous = FULL"
        )  # commits must be on disk before acknowledgements
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    return engine


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TokenmillError(
            f"the folder {folder} of the SQLite file cannot be made: {error.strerror}"
        ) from error


def _connect(path: Path, may_create: bool) -> sqlite3.Connection:
    if not may_create and not path.exists():
        raise sqlite3.OperationalError(
            f"there is no database at {path}: `tokenmill db upgrade` makes it, TOKENMILL_DATABASE_URL names another"
        )
    mode = "rwc" if may_create else "rw"
    return sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=LOCK_TIMEOUT_S, check_same_thread=False
    )


def _leave_removed_file(engine: Engine, path: Path) -> None:
    """Drop a connection whose file was removed or replaced: its commits would succeed, and be lost
    with the file.
    """

    def identity() -> tuple[int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @event.listens_for(engine, "connect")
    def _note(_connection: Any, record: Any) -> None:
        record.info["file"] = identity()

    @event.listens_for(engine, "checkout")
    def _compare(_connection: Any, record: Any, _proxy: object) -> None:
        if record.info.get("file") != identity():
            raise DisconnectionError(f"{path} was removed or replaced")


class Threads:
    """Runs blocking calls. A thread that has finished its call waits for the next one, since
    creating a thread costs a third of a transaction. A thread whose call took too long is
    abandoned, and ends when the call returns.
    """

    def __init__(self) -> None:
        self._idle: list[_Thread] = []  # used only by the event loop

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """Run the call in a thread. Raises StoreUnavailable when it takes longer than
        `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        thread = self._idle.pop() if self._idle else _Thread()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():  # the caller has given up
                thread.end()
                return
            self._idle.append(thread)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                result = call()
            except BaseException as caught:  # raised in the awaiting task
                error = caught
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:  # the loop ended during the call
                thread.end()

        thread.calls.put(run)
        try:
            async with asyncio.timeout(
                timeout_s
            ):  # not wait_for: Python 3.11's can swallow a cancellation
                return await future
        except TimeoutError as error:
            raise StoreUnavailable(
                f"the SQL store did not answer within {timeout_s:g} s"
            ) from error

    def close(self) -> None:
        """End the idle threads. Threads with an abandoned call end when it returns."""
        while self._idle:
            self._idle.pop().end()


class _Thread:
    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="sql", daemon=True).start()

    def end(self) -> None:
        self.calls.put(None)

    def _serve(self) -> None:
        while (call := self.calls.get()) is not None:
            call()
