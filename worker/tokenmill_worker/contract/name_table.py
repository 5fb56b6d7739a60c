"""Tables that a setting holds as text, such as the folder of each adapter."""

from __future__ import annotations


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
