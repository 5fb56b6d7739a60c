"""Decides what a failed transaction means: wait, repair the schema, or look for the one row that
cannot be stored.

| kind | examples |
|---|---|
| LATER | connection refused or lost, locked, deadlock, disk full, read-only replica, timeout |
| SCHEMA | a table or column is missing: waits as well, and the error names the remedy |
| ROW | a value that this database cannot hold: NUL in text, too large, violated constraint |

An unknown error counts as LATER: a job that waits is not lost.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from sqlalchemy import exc


class ErrorKind(StrEnum):
    LATER = "later"
    SCHEMA = "schema"
    ROW = "row"


# PostgreSQL's classes of SQLSTATE (its documentation, appendix A)
_SQLSTATE_CLASSES: Final = {
    "21": ErrorKind.ROW,  # cardinality violation
    "22": ErrorKind.ROW,  # data exception
    "23": ErrorKind.ROW,  # integrity constraint violation
    "54": ErrorKind.ROW,  # program limit exceeded: too large for an index or a page
    "42": ErrorKind.SCHEMA,  # undefined table or column, insufficient privilege
    "3F": ErrorKind.SCHEMA,  # invalid schema name
}
_SQLITE_SCHEMA: Final = ("no such table", "no such column", "has no column")
# SQLite's messages, and PostgreSQL's in English: libpq gives no SQLSTATE for a connection that
# failed.
_MISCONFIGURED: Final = re.compile(
    r"there is no database at|file is not a database|password authentication failed"
    r'|no password supplied|(database|role) ".*" does not exist'
)
_SQLITE_ROW: Final = ("string or blob too big", "too large to convert")


def error_kind(error: BaseException) -> ErrorKind:
    """Classify any exception that a transaction raised."""
    if isinstance(error, exc.DBAPIError):
        return _of_driver(error)
    if isinstance(
        error, exc.StatementError | OverflowError | UnicodeError | TypeError | ValueError
    ):
        return ErrorKind.ROW  # a value that the driver could not even send
    return ErrorKind.LATER


def _of_driver(error: exc.DBAPIError) -> ErrorKind:
    if error.connection_invalidated:
        return ErrorKind.LATER
    sqlstate = getattr(error.orig, "sqlstate", None)
    if isinstance(sqlstate, str):
        return _SQLSTATE_CLASSES.get(sqlstate[:2], ErrorKind.LATER)
    words = str(error.orig)
    if any(phrase in words for phrase in _SQLITE_SCHEMA):
        return ErrorKind.SCHEMA
    if isinstance(error, exc.DataError | exc.IntegrityError) or any(
        phrase in words for phrase in _SQLITE_ROW
    ):
        return ErrorKind.ROW
    return ErrorKind.LATER


def is_misconfigured(error: BaseException) -> bool:
    """Must a person repair the cause, so that retries cannot help?"""
    return _MISCONFIGURED.search(str(error)) is not None
