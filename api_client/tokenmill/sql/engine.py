"""Opens SQL databases: forms of the URL, SQLite's write-ahead log, PostgreSQL's timeouts.

`open_engine` opens each of them: for workers, tasks and migrations, which write, and for producers,
which read and leave the settings of an SQLite file as they are.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event, exc, make_url
from sqlalchemy.engine import URL, ExceptionContext

from tokenmill.errors import ConfigurationError
from tokenmill.sql.driver_errors import is_fault_of_statement

LOCK_TIMEOUT_S: Final = 10
STATEMENT_TIMEOUT_S: Final = 30
_BUSY_POLL_S: Final = 0.02
# PostgreSQL ends a transaction that sends nothing for so long. A process that freezes in one would
# otherwise block every other writer of its rows until it continues.
IDLE_TIMEOUT_S: Final = STATEMENT_TIMEOUT_S + 5


def parse_database_url(url: str | URL) -> URL:
    """Parse a URL; `postgres://` and `postgresql://` select psycopg 3."""
    parsed = make_url(url)
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    return parsed


def sqlite_file(url: str) -> Path | None:
    """Return the absolute path of this URL's SQLite file; None for another database."""
    parsed = parse_database_url(url)
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
    return None if path is None or file_exists(path) else path


def file_exists(path: Path) -> bool:
    """Return whether the file is there; False also for a name that the system refuses."""
    try:
        return path.exists()
    except OSError:
        return False


def open_engine(
    url: str | URL,
    *,
    pool_size: int = 2,
    may_create: bool = False,
    is_producer: bool = False,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
) -> Engine:
    """Create an engine that connects lazily; raises only for a URL that makes no sense.

    `pool_size`: connections to PostgreSQL that stay open. `may_create`: create an SQLite file that
    does not exist; without it, a missing file is an error. `is_producer`: leave the settings of an
    SQLite file as they are. `idle_timeout_s`: how long a PostgreSQL transaction may send nothing.
    """
    parsed = parse_database_url(url)
    match parsed.get_backend_name():
        case "sqlite":
            engine = _open_sqlite(parsed, may_create, is_producer)
        case "postgresql":
            engine = _open_postgresql(parsed, pool_size, idle_timeout_s)
        case other:
            raise ValueError(f"the SQL store must be SQLite or PostgreSQL, not {other}")
    _close_useless_connections(engine)
    return engine


def _open_postgresql(url: URL, pool_size: int, idle_timeout_s: float) -> Engine:
    arguments: dict[str, Any] = {
        "connect_timeout": 5,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "application_name": "tokenmill",
        "client_encoding": "utf8",  # whatever PGCLIENTENCODING or the role's settings say
        "prepare_threshold": None,  # poolers in transaction mode lose prepared statements
    }
    engine = create_engine(
        url,
        connect_args={name: value for name, value in arguments.items() if name not in url.query},
        hide_parameters=True,
        pool_size=pool_size,
        max_overflow=2 * pool_size,
        pool_pre_ping=True,
    )
    _require_utf8(engine)
    _limit_idle_transactions(engine, idle_timeout_s)
    return engine


def limit_statements(connection: Connection) -> None:
    """Limit how long a PostgreSQL statement of this transaction runs, and waits for a lock."""
    if connection.dialect.name == "postgresql":
        _set_local(connection, lock_timeout=LOCK_TIMEOUT_S, statement_timeout=STATEMENT_TIMEOUT_S)


def _close_useless_connections(engine: Engine) -> None:
    """Close a connection that has failed for any other reason than its statement, and all others of
    the pool before they are used again.

    A session keeps what its server told it at its start. After a switchover it may stay read-only,
    or keep a search path, a right or a broken file, though the cause is gone; a ping does not
    notice.
    """

    @event.listens_for(engine, "handle_error")
    def _judge(context: ExceptionContext) -> None:
        if not is_fault_of_statement(context.original_exception):
            context.is_disconnect = True


def _require_utf8(engine: Engine) -> None:
    """Refuse a database that cannot store every text. Raises ConfigurationError at each connect."""

    @event.listens_for(engine, "connect", insert=True)  # SQLAlchemy's queries fail on SQL_ASCII
    def _check(connection: Any, _record: object) -> None:
        encoding = connection.info.parameter_status("server_encoding")
        if encoding not in (None, "UTF8"):
            name = connection.info.dbname
            connection.close()
            raise ConfigurationError(
                f"the database {name} has the encoding {encoding}, which cannot store every text: "
                "make it with ENCODING 'UTF8'"
            )


def _limit_idle_transactions(engine: Engine, idle_timeout_s: float) -> None:
    """Set the limit in each transaction: a pooler in transaction mode gives each another session,
    and refuses such a parameter at the start of a connection.
    """

    @event.listens_for(engine, "begin")
    def _limit(connection: Connection) -> None:
        _set_local(connection, idle_in_transaction_session_timeout=idle_timeout_s)


def _set_local(connection: Connection, **seconds: float) -> None:
    calls = ", ".join(
        f"set_config('{name}', '{round(value * 1000)}ms', true)" for name, value in seconds.items()
    )
    connection.exec_driver_sql(f"SELECT {calls}")


def _open_sqlite(url: URL, may_create: bool, is_producer: bool) -> Engine:
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
        _drop_connections_of_removed_file(engine, path)

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        # first, because the next statement may wait for a lock
        cursor.execute(f"PRAGMA busy_timeout = {LOCK_TIMEOUT_S * 1000}")
        if not is_producer:
            _use_write_ahead_log(cursor)
        # commits must be on disk before acknowledgements
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "invalidate")
    def _roll_back(connection: Any, _record: object, _error: object) -> None:
        # closed alone, it keeps its locks while a traceback holds one of its cursors
        with contextlib.suppress(sqlite3.Error):
            connection.rollback()

    return engine


def _use_write_ahead_log(cursor: sqlite3.Cursor) -> None:
    """Set the journal mode; while another connection changes it, try again.

    SQLite's own timeout does not hold there: of two connections that change the mode of a new file,
    one fails at once.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(_BUSY_POLL_S)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {folder} of the SQLite file cannot be made: {error.strerror}"
        ) from error


def _connect(path: Path, may_create: bool) -> sqlite3.Connection:
    if not may_create and not file_exists(path):
        raise sqlite3.OperationalError(
            f"there is no database at {path}: `tokenmill db upgrade` makes it, "
            "TOKENMILL_DATABASE_URL names another"
        )
    if may_create:
        _make_file(path)
    return sqlite3.connect(
        f"{path.as_uri()}?mode=rw", uri=True, timeout=LOCK_TIMEOUT_S, check_same_thread=False
    )


def _make_file(path: Path) -> None:
    """Create the file for this account alone, since it will hold prompts and answers. SQLite gives
    its log and index beside it the same mode. A file that exists keeps its mode.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        return
    except OSError as error:
        raise sqlite3.OperationalError(f"unable to open database file: {error.strerror}") from error


def _drop_connections_of_removed_file(engine: Engine, path: Path) -> None:
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
            raise exc.DisconnectionError(f"{path} was removed or replaced")
