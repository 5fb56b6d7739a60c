"""Tables that a setting holds as text, such as the folder of each adapter."""

from __future__ import annotations

import shlex


def read_table(text: str, form: str) -> dict[str, str]:
    """Parse `a=b,c=d` into a dictionary; white space around the parts is ignored.

    Raises:
        ValueError: an entry is malformed or repeated.
    """
    table: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        if not name or not value:
            raise ValueError(f"must be {form},{form}, not {entry!r}")
        if name in table:
            raise ValueError(f"names {name!r} twice")
        table[name] = value
    return table


def read_arguments(text: str) -> dict[str, str]:
    """Parse `a=b --c=d` into a dictionary, as a shell splits words: the setting `engine_arg`.

    Raises:
        ValueError: a word is malformed, or a name is repeated.
    """
    table: dict[str, str] = {}
    for word in shlex.split(text):
        name, sign, value = word.removeprefix("--").partition("=")
        if not sign or not name:
            raise ValueError(f"must be NAME=VALUE, separated by spaces, not {word!r}")
        if name in table:
            raise ValueError(f"names {name} twice")
        table[name] = value
    return table
