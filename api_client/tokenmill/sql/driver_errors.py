"""Says what an error of a database's driver means: one sentence for people, and who must act.

Knows SQLSTATE (PostgreSQL's documentation, appendix A) and SQLite's result codes. libpq gives no
SQLSTATE for a connection that failed: there the English message decides.
"""

from __future__ import annotations

import re
import sqlite3
from typing import Final

from sqlalchemy import exc

from tokenmill.errors import ConfigurationError

# cardinality violation, data exception, integrity constraint violation, program limit exceeded
_STATEMENT_SQLSTATES: Final = ("21", "22", "23", "54")
_STATEMENT_SQLITE_CODES: Final = (
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_RANGE,
)
_MISSING_SQLSTATES: Final = ("42P01", "42703")  # undefined table, undefined column
_MISSING_IN_SQLITE: Final = ("no such table", "no such column", "has no column")
_MISCONFIGURED: Final = re.compile(
    r"there is no database at|file is not a database|password authentication failed"
    r'|no password supplied|(database|role) ".*" does not exist'
)


def sentence_of(error: BaseException) -> str:
    """Return the driver's message on one line, without the statement and its values, which may hold
    a user's text.
    """
    source = _source(error)
    words = " ".join(str(source).split("\nLINE ")[0].split("DETAIL:")[0].split())
    return words[:300] or type(source).__name__


def sqlstate_of(error: BaseException) -> str | None:
    """Return PostgreSQL's code of five letters; None where it gave none."""
    code = getattr(_source(error), "sqlstate", None)
    return code if isinstance(code, str) else None


def is_fault_of_statement(error: BaseException) -> bool:
    """Return whether the error comes from the statement or its values, so that any other connection
    to the same database refuses it as well.
    """
    sqlstate = sqlstate_of(error)
    if sqlstate is not None:
        return sqlstate[:2] in _STATEMENT_SQLSTATES
    code = getattr(_source(error), "sqlite_errorcode", None)
    return code is None or code & 0xFF in _STATEMENT_SQLITE_CODES


def lacks_schema(error: BaseException) -> bool:
    """Return whether a table or a column is missing, so that `tokenmill db upgrade` helps."""
    sqlstate = sqlstate_of(error)
    if sqlstate is not None:
        return sqlstate in _MISSING_SQLSTATES
    words = str(_source(error))
    return any(phrase in words for phrase in _MISSING_IN_SQLITE)


def is_misconfigured(error: BaseException) -> bool:
    """Return whether a person must repair the cause, so that retries cannot help."""
    return isinstance(error, ConfigurationError) or _MISCONFIGURED.search(str(error)) is not None


def _source(error: BaseException) -> BaseException:
    return error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
