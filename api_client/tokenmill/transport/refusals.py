"""Turns redis-py's errors into the client's, one sentence each; recognises a server that answers
but takes no writes.
"""

from __future__ import annotations

import os
import re
from typing import Final

from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ResponseError,
)

from tokenmill.errors import (
    ConfigurationError,
    InvalidRequest,
    QueueUnavailable,
    TokenmillError,
    not_unicode,
)
from tokenmill.transport.connect import SERVER_TROUBLE, server_words
from tokenmill.transport.repairs import is_readonly_error

TRANSLATED: Final = (*SERVER_TROUBLE, UnicodeError)  # what `translate` takes
# redis-py's words: "Error 111 connecting to localhost:6379. Connection refused."
_NOT_CONNECTED = re.compile(r"Error (-?\d+) connecting to (\S+)\. ?(.*)", re.DOTALL)

_BY_CODE = {
    "MISCONF": "it cannot save its data (MISCONF)",
    "NOREPLICAS": "too few replicas are in step (NOREPLICAS)",
}


def write_refusal(error: BaseException) -> str | None:
    """Return why the server refuses writes; None if the error says something else."""
    for one in (error, error.__cause__):
        if not isinstance(one, ResponseError):
            continue
        reason = _BY_CODE.get(str(one).partition(" ")[0])
        if isinstance(one, OutOfMemoryError):
            reason = "used memory > 'maxmemory'"
        elif is_readonly_error(one):
            reason = "it is a read-only replica"
        if reason is not None:
            return f"Redis refuses writes: {reason}"
    return None


def translate(error: Exception) -> TokenmillError:
    """Return the client's exception for one of TRANSLATED.

    A user that the server rejects becomes ConfigurationError, and an argument that a script rejects
    (INVALID) or that cannot be encoded becomes InvalidRequest: waiting repairs neither. Every other
    error is trouble with the server and becomes QueueUnavailable.
    """
    if isinstance(error, UnicodeEncodeError):
        return not_unicode(error)
    if isinstance(error, UnicodeError):  # socket's, for labels that are empty or too long
        return ConfigurationError(f"the Redis URL's host is not the name of a host: {error}")
    source = error.__cause__ if isinstance(error, QueueUnavailable) else error
    if isinstance(source, (AuthenticationError, NoPermissionError)):
        refusal = ConfigurationError(f"Redis refuses this user: {server_words(source)}")
        refusal.__cause__ = source
        return refusal
    if isinstance(error, QueueUnavailable):
        return error
    if isinstance(error, ResponseError) and str(error).startswith("INVALID "):
        return InvalidRequest([str(error).removeprefix("INVALID ")])
    trouble = QueueUnavailable(_unavailable(error, server_words(error)))
    trouble.__cause__ = error
    return trouble


def _unavailable(error: Exception, words: str) -> str:
    """Return one sentence: which server cannot be reached and why, or what the server answered."""
    if (refusal := write_refusal(error)) is not None:
        return refusal
    if isinstance(error, ResponseError):
        return f"Redis answers with an error: {words}"
    refused = _NOT_CONNECTED.match(words)
    if refused is None:
        return f"cannot reach Redis: {words}"
    number, address, rest = refused.groups()
    is_system_error = int(number) > 0 and not rest.startswith("[SSL")  # TLS errors have number 1
    reason = os.strerror(int(number)) if is_system_error else rest.rstrip(".")
    return f"cannot reach Redis at {address}: {reason}"
