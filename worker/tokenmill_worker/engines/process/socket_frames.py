"""Both ends of the socket between engine process and worker: a 4-byte length, then MessagePack.

Latency is kept low: a report is sent by the thread that made it, and decoded in the event loop's
read callback.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable
from typing import Final, NoReturn, cast

import msgspec

from tokenmill_worker.contract.messages import (
    MAX_FRAME_BYTES,
    EngineFailed,
    FrameError,
    Report,
    read_report,
)

LENGTH_BYTES: Final = 4


class FrameWriter:
    """Sends reports in order, without blocking.

    `put` sends from the caller's thread. Another thread would get to send only when the interpreter
    switches threads, and the next step would be planned meanwhile. What a full socket does not
    accept goes to a thread, and so does everything after it until that thread has caught up.
    """

    def __init__(self, connection: socket.socket, on_broken: Callable[[], NoReturn]) -> None:
        self._connection = connection
        self._on_broken = on_broken
        self._encoder = msgspec.msgpack.Encoder()
        self._late: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_late = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._send_late, name="reports")
        self._thread.start()

    def put(self, report: Report) -> None:
        payload = self._encoder.encode(report)
        frame = len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        with self._lock:
            sent = 0 if self._num_late else self._send_now(frame)
            if sent < len(frame):
                self._num_late += 1
                self._late.put(frame[sent:])

    def close(self) -> None:
        """Wait until everything is sent, then end the thread."""
        self._late.put(None)
        self._thread.join()

    def _send_now(self, frame: bytes) -> int:
        try:
            return self._connection.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._on_broken()

    def _send_late(self) -> None:
        try:
            while (frame := self._late.get()) is not None:
                self._connection.sendall(frame)
                with self._lock:
                    self._num_late -= 1
        except BaseException:  # also a lack of memory: no later report would be sent
            self._on_broken()


class FrameReader(asyncio.Protocol):
    """The worker's end of the socket; passes on each report from the read callback, without a task.

    The last value passed on is an EngineFailed or None, however the stream ends.
    """

    def __init__(self, on_report: Callable[[Report | None], None]) -> None:
        self._on_report = on_report
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from it
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        if self.ended.is_set():
            return
        self._buffer += data
        try:
            self._take_frames()
        except FrameError as error:
            self._end(EngineFailed(str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._end(None)

    def write(self, payload: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        else:
            self._end(None)

    def _take_frames(self) -> None:
        buffer, start = self._buffer, 0
        while len(buffer) - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            length = int.from_bytes(buffer[start:body], "little")
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a report of {length} bytes is announced")
            if len(buffer) - body < length:
                break
            start = body + length
            self._on_report(read_report(bytes(buffer[body:start])))
        del buffer[:start]

    def _end(self, last: EngineFailed | None) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self._on_report(last)
