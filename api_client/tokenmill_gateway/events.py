"""Writes server-sent events: bytes whose constant part is encoded once per stream."""

from __future__ import annotations

from typing import Final

import msgspec

# One line alone: behind an event with an id, OpenAI's client takes a blank line for an empty event.
COMMENT: Final = b": keep-alive\n"
DONE: Final = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


def data_event(value: object) -> bytes:
    """Return an event without a name, as those of chats are."""
    return b"data: " + encode(value) + b"\n\n"


def around(members: dict[str, object], changing: str) -> tuple[bytes, bytes]:
    """Return the JSON of an object before and after the value of its member `changing`."""
    whole: bytes = encode({**members, changing: None})
    before, after = whole.rsplit(b'"' + changing.encode() + b'":null', 1)
    return before + b'"' + changing.encode() + b'":', after
