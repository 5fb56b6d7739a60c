"""Makes fuzzing inputs: valid messages with a part changed, by structure or bytes; repeatable by
seed.

A change by structure unpacks MessagePack (also where it stands inside a byte string, as chunks do
in a log), replaces, repeats, nests or drops one node and packs it again: what a producer of
another make would send.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import msgpack

NUMBERS: Final = (
    0,
    1,
    -1,
    127,
    128,
    255,
    256,
    4096,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
)
FLOATS: Final = (0.0, -0.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"), 0.5)
TEXTS: Final = (
    "",
    "a",
    "\0",
    "\ud800",
    "é☀👩",
    "a" * 300,
    "1",
    "-1",
    "nan",
    "null",
    "{}",
    "\r\n",
    ":",
    "{q}",
    "queued",
)
BYTES: Final = (
    b"",
    b"\xff\xfe",
    b"\x80",
    b"\xc1",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\x7f\xff\xff\xff",
    b"\x81\xa1a",
)
MAX_BYTES: Final = 65_536


def pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes) -> Any:
    """Raises ValueError (or what msgpack derives from it) for bytes that are no message."""
    return msgpack.unpackb(data, unicode_errors="surrogateescape", strict_map_key=False)


def mutate(data: bytes, random: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Make one input from another."""
    for _ in range(random.choice((1, 1, 2, 4))):
        kind = random.random()
        if kind < 0.6:
            data = _by_structure(data, random)
        elif kind < 0.95 or not seeds:
            data = _by_bytes(data, random)
        else:
            other = random.choice(seeds)
            data = data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]
    return data[:MAX_BYTES]


def _by_structure(data: bytes, random: random.Random) -> bytes:
    try:
        return pack(_changed(unpack(data), random))
    except (
        ValueError,
        OverflowError,
        TypeError,
        RecursionError,
        UnicodeError,
        msgpack.exceptions.UnpackException,
    ):
        return _by_bytes(data, random)


def _changed(node: Any, random: random.Random) -> Any:
    """Return the same tree with one place in it changed."""
    if isinstance(node, bytes) and node and random.random() < 0.8:
        return _by_structure(node, random)
    if isinstance(node, dict) and node and random.random() < 0.8:
        key = random.choice(list(node))
        return _changed_entry(node, key, random)
    if isinstance(node, list) and node and random.random() < 0.8:
        place = random.randrange(len(node))
        how = random.random()
        if how < 0.7:
            return [*node[:place], _changed(node[place], random), *node[place + 1 :]]
        if how < 0.85:
            return node[:place] + node[place + 1 :]
        return node * random.choice((2, 3, 100)) if len(node) < 50 else node[::-1]
    return _other(node, random)


def _changed_entry(node: dict[Any, Any], key: Any, random: random.Random) -> dict[Any, Any]:
    how = random.random()
    if how < 0.75:
        return {**node, key: _changed(node[key], random)}
    rest = {name: value for name, value in node.items() if name != key}
    if how < 0.85:
        return rest
    if how < 0.95:
        return {**rest, _leaf(random) if random.random() < 0.3 else f"{key}x": node[key]}
    return {**node, **{str(i): node[key] for i in range(random.choice((1, 70)))}}


def _other(node: Any, random: random.Random) -> Any:
    """Return a replacement for `node`."""
    how = random.random()
    if isinstance(node, bool) or node is None or how < 0.25:
        return _leaf(random)
    if isinstance(node, int) and how < 0.8:
        return (
            node + random.choice((-1, 1, 7, -1000))
            if random.random() < 0.5
            else random.choice(NUMBERS)
        )
    if isinstance(node, float) and how < 0.8:
        return random.choice(FLOATS)
    if isinstance(node, str) and how < 0.8:
        return random.choice(
            (node + random.choice(TEXTS), node[::-1], node[:-1], random.choice(TEXTS))
        )
    if how < 0.9:
        return [node] if random.random() < 0.5 else {"a": node}
    for _ in range(random.choice((2, 70, 1500))):
        node = [node]
    return node


def _leaf(random: random.Random) -> Any:
    return random.choice((None, True, False, [], {}, *NUMBERS, *FLOATS, *TEXTS, *BYTES))


def _by_bytes(data: bytes, random: random.Random) -> bytes:
    place = random.randint(0, len(data))
    how = random.randrange(6)
    if how == 0 or not data:
        return data[:place] + random.choice(BYTES) + data[place:]
    if how == 1:
        return data[:place]
    if how == 2:
        return data[:place] + data[place + random.randint(1, 8) :]
    if how == 3:
        return (
            data[:place]
            + data[place : place + random.randint(1, 64)] * random.choice((2, 10))
            + data[place:]
        )
    if how == 4:
        return data[:place] + random.randbytes(random.randint(1, 8)) + data[place + 1 :]
    place = min(place, len(data) - 1)
    return data[:place] + bytes((data[place] ^ 1 << random.randrange(8),)) + data[place + 1 :]
