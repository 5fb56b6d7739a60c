"""The engine process's main: `python -m worker.engine.child FD`, spoken to over a Unix socket.

The main thread owns the device and the loop, and sends reports itself; another reads commands into the
mailbox. A third sends what the socket does not take at once. When the socket ends, the parent is gone: the
process ends at once, even in the middle of a step.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from worker.engine.config import EngineConfig
from worker.engine.cpu_slices import lengthen_slices
from worker.engine.faults import why
from worker.engine.mailbox import Broken, FrameError, Logged, Mailbox, Progress, Report, read_command
from worker.engine.pipe import LENGTH_BYTES, Outlet

PARENT_GONE = 3  # exit status


class _Start(msgspec.Struct):
    config: EngineConfig
    cache_dir: str | None = None


def main(descriptor: int) -> int:
    """Load the engine, serve until told to stop; the exit status is 0 only then."""
    # Read by torch's OpenMP when it is loaded. Threads that spin at their barriers take the cores from the worker's
    # I/O and its neighbours, and then wait for them: on a shared machine steps became ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251 - a library reads it, we do not
    faulthandler.enable()  # where a kernel or a library crashes, the log shows in the midst of what
    for number in (signal.SIGINT, signal.SIGTERM):  # the worker decides when its engine ends
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(True)
    try:
        start = msgspec.msgpack.decode(_receive(connection), type=_Start)
    except (EOFError, OSError):
        return PARENT_GONE  # before it could say what to load
    mailbox = Mailbox()
    threading.Thread(target=_read_commands, args=(connection, mailbox), name="commands", daemon=True).start()
    reports = Outlet(connection, on_broken=lambda: os._exit(PARENT_GONE))
    try:
        return _serve(start, mailbox, reports.put)
    finally:
        reports.close()


def _serve(start: _Start, mailbox: Mailbox, emit: Callable[[Report], None]) -> int:
    from worker.engine.engine import Engine
    from worker.engine.loop import EngineLoop

    lengthen_slices()  # of this thread and those that compute with it, not of the ones that read and write
    telling = _Telling(emit)
    try:
        engine = Engine.load(
            start.config,
            cache_dir=start.cache_dir,
            on_progress=lambda message, fraction: emit(Progress(message, fraction)),
        )
    except Exception as error:
        emit(Broken(why(error), at_start=True))
        return 1
    finally:
        telling.loaded()
    gc.collect()
    gc.freeze()  # the model and its libraries: every full collection would go through them, in the middle of a step
    EngineLoop(engine, mailbox, emit).run()
    return 0


class _Telling(logging.Handler):
    """Hands log records to the worker, which writes the log: this process has none of its own.

    Warnings of any library go until the end; what the engine says of its loading (kernels that are compiled, how
    weights lie in memory) goes until `loaded`.
    """

    def __init__(self, emit: Callable[[Report], None]) -> None:
        super().__init__(logging.INFO)
        self._report = emit
        logging.getLogger().addHandler(self)
        logging.captureWarnings(True)
        logging.getLogger("worker.engine").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self._report(Logged(record.levelno, record.name, record.getMessage()))

    def loaded(self) -> None:
        logging.getLogger("worker.engine").setLevel(logging.NOTSET)


def _receive(connection: socket.socket) -> bytes:
    """One frame; raises EOFError at the end of the stream."""
    length = int.from_bytes(_receive_exactly(connection, LENGTH_BYTES), "little")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if received == 0:
            raise EOFError
        view = view[received:]
    return bytes(buffer)


def _read_commands(connection: socket.socket, mailbox: Mailbox) -> None:
    arrivals = select.poll()  # who waits in recv is woken whenever the worker has read what we sent; who polls is not
    arrivals.register(connection, select.POLLIN)
    try:
        while arrivals.poll():
            mailbox.put(read_command(_receive(connection)))
    except (EOFError, OSError):
        os._exit(PARENT_GONE)  # nobody wants what the running step would give
    except FrameError as error:
        os.write(2, f"the engine process ends: {error}\n".encode())
        os._exit(4)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
