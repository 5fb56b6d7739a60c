"""Decides what a failed transaction means: wait, repair the schema, or look for the one row that
cannot be stored.

| kind | examples |
|---|---|
| LATER | connection refused or lost, locked, disk full, read-only replica, a right is missing |
| SCHEMA | a table or column is missing: waits as well, and the error names the remedy |
| ROW | a value that this database cannot hold: NUL in text, too large, violated constraint |

An unknown error counts as LATER: a job that waits is not lost.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from sqlalchemy import exc

from tokenmill.errors import TokenmillError
from tokenmill.sql.driver_errors import is_fault_of_statement, lacks_schema, sqlstate_of


class ErrorKind(StrEnum):
    LATER = "later"
    SCHEMA = "schema"
    ROW = "row"


_SQLITE_ROW: Final = ("string or blob too big", "too large to convert")


def error_kind(error: BaseException) -> ErrorKind:
    """Classify any exception that a transaction raised."""
    if isinstance(error, exc.DBAPIError):
        return _of_driver(error)
    if isinstance(error, TokenmillError):  # the database is the wrong one
        return ErrorKind.LATER
    if isinstance(
        error, exc.StatementError | OverflowError | UnicodeError | TypeError | ValueError
    ):
        return ErrorKind.ROW  # a value that the driver could not even send
    return ErrorKind.LATER


def _of_driver(error: exc.DBAPIError) -> ErrorKind:
    if lacks_schema(error):
        return ErrorKind.SCHEMA
    if sqlstate_of(error) is not None:
        return ErrorKind.ROW if is_fault_of_statement(error) else ErrorKind.LATER
    if error.connection_invalidated:
        return ErrorKind.LATER
    if isinstance(error, exc.DataError | exc.IntegrityError) or any(
        phrase in str(error.orig) for phrase in _SQLITE_ROW
    ):
        return ErrorKind.ROW
    return ErrorKind.LATER
