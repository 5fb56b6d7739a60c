"""Decides what a failed transaction means: wait, repair the schema, or look for the one row that
cannot be stored.

| verdict | examples |
|---|---|
| LATER | connection refused or lost, locked, deadlock, serialization, disk full, read-only replica, timeout |
| SCHEMA | a table or column is missing: waits as well, and the error names the remedy |
| ROW | a value that this database cannot hold: NUL in text, too large, violated constraint |

An unknown error counts as LATER: a job that waits is not lost.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from sqlalchemy import exc


class Verdict(StrEnum):
    LATER = "later"
    SCHEMA = "schema"
    ROW = "row"


# PostgreSQL's classes of SQLSTATE (its documentation, appendix A)
_SQLSTATE_CLASSES: Final = {
    "21": Verdict.ROW,  # cardinality violation
    "22": Verdict.ROW,  # data exception
    "23": Verdict.ROW,  # integrity constraint violation
    "54": Verdict.ROW,  # program limit exceeded: too large for an index or a page
    "42": Verdict.SCHEMA,  # undefined table or column, insufficient privilege
    "3F": Verdict.SCHEMA,  # invalid schema name
}
_SQLITE_SCHEMA: Final = ("no such table", "no such column", "has no column")
# SQLite's words, and PostgreSQL's in English: libpq gives no SQLSTATE for a connection that failed.
_MISCONFIGURED: Final = re.compile(
    r"there is no database at|file is not a database|password authentication failed|no password supplied"
    r'|(database|role) ".*" does not exist'
)
_SQLITE_ROW: Final = ("string or blob too big", "too large to convert")


def verdict_of(error: BaseException) -> Verdict:
    """Classify any exception that a transaction raised."""
    if isinstance(error, exc.DBAPIError):
        return _of_driver(error)
    if isinstance(
        error, exc.StatementError | OverflowError | UnicodeError | TypeError | ValueError
    ):
        return Verdict.ROW  # a value that the driver could not even send
    return Verdict.LATER


def _of_driver(error: exc.DBAPIError) -> Verdict:
    if error.connection_invalidated:
        return Verdict.LATER
    sqlstate = getattr(error.orig, "sqlstate", None)
    if isinstance(sqlstate, str):
        return _SQLSTATE_CLASSES.get(sqlstate[:2], Verdict.LATER)
    words = str(error.orig)
    if any(phrase in words for phrase in _SQLITE_SCHEMA):
        return Verdict.SCHEMA
    if isinstance(error, exc.DataError | exc.IntegrityError) or any(
        phrase in words for phrase in _SQLITE_ROW
    ):
        return Verdict.ROW
    return Verdict.LATER


def is_misconfigured(error: BaseException) -> bool:
    """Must a person repair the cause, so that retries cannot help?"""
    return _MISCONFIGURED.search(str(error)) is not None


def sentence_of(error: BaseException) -> str:
    """Return the driver's message on one line, without the statement and its values, which may hold
    a user's text.
    """
    source = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
    words = " ".join(str(source).split("\nLINE ")[0].split("DETAIL:")[0].split())
    return words[:300] or type(source).__name__
