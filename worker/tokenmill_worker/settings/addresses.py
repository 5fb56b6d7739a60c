"""Checks the addresses among the settings. Each check returns one sentence for an address that
cannot be used, else None.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from tokenmill.errors import ConfigurationError
from tokenmill.transport.connect import parse_url


def redis_problem(url: str) -> str | None:
    try:
        parse_url(url)
    except ConfigurationError as error:
        return str(error).split(", not ")[0]
    return None


def database_problem(url: str) -> str | None:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.partition("+")[0] not in ("sqlite", "postgresql", "postgres"):
        return "must begin with sqlite:/// or postgresql://"
    if scheme.startswith("sqlite") and rest.split("?")[0].strip("/") in ("", ":memory:"):
        return "must name a file, as in sqlite:///tokenmill.db"
    try:
        _ = urlsplit(url).port
    except ValueError:
        return "cannot be read: is a character of its password not quoted (%2F for /, %40 for @)?"
    return None


def endpoint_problem(url: str) -> str | None:
    return (
        None
        if not url or re.match(r"https?://[^/\s]", url)
        else "must begin with http:// or https://"
    )
