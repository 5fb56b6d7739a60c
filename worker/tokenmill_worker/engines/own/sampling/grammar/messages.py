"""Messages between the engine and the process that compiles grammars."""

from __future__ import annotations

import socket

import msgspec


class CompileSetup(msgspec.Struct):
    """The vocabulary (xgrammar's, serialised), and the limits of one grammar."""

    info: str
    special_ids: list[int]
    cpu_s: float
    wall_s: float
    memory_bytes: int


class CompileQuestion(msgspec.Struct):
    kind: str
    source: str


class CompileAnswer(msgspec.Struct):
    """A compiled grammar, or a problem with its code, or the signal that ended the process.

    `compiled` is empty for a grammar that the engine compiles itself. With `is_last` the process
    ends behind its answer.
    """

    compiled: str = ""
    problem: str = ""
    code: str = ""
    signal: int = 0
    is_last: bool = False


def send(to: socket.socket, message: msgspec.Struct) -> None:
    payload = msgspec.msgpack.encode(message)
    to.sendall(len(payload).to_bytes(4, "big") + payload)


def receive(source: socket.socket) -> bytes:
    """Return the next message; raises EOFError where the other side has ended."""
    return _exactly(source, int.from_bytes(_exactly(source, 4), "big"))


def _exactly(source: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = source.recv(min(size - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)
