"""The main module of the engine process; its argument is the descriptor of a Unix socket.

The main thread owns the device, runs the engine loop and sends reports. A second thread reads
commands into the mailbox. A third sends what the socket does not accept at once. When the socket
ends, the parent is gone, and the process ends at once, even in the middle of a step.
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
from collections.abc import Callable, MutableMapping

import msgspec

from tokenmill_worker.contract.mailbox import Mailbox
from tokenmill_worker.contract.messages import (
    EngineFailed,
    FrameError,
    LoadProgress,
    Logged,
    Report,
    read_command,
)
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.errors import lacks_memory, why
from tokenmill_worker.engine.process.socket_frames import LENGTH_BYTES, FrameWriter
from tokenmill_worker.engine.process.time_slices import lengthen_slices

PARENT_GONE = 3  # exit status


class _Start(msgspec.Struct):
    config: EngineConfig
    cache_dir: str | None = None


def main(descriptor: int) -> int:
    """Load the engine and serve until a Stop command; return 0 only then."""
    # Torch's OpenMP reads this when it is loaded. Threads that spin at barriers take cores from
    # the worker's I/O and from other processes, and then wait for those: on a shared machine steps
    # became ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251 - a library reads it, we do not
    set_allocator(os.environ)  # noqa: TID251
    faulthandler.enable()  # if a kernel or library crashes, the log shows the stack
    # The worker decides when its engine ends, and started this process with both signals blocked.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(True)
    try:
        start = msgspec.msgpack.decode(_receive(connection), type=_Start)
    except (EOFError, OSError):
        return PARENT_GONE  # it ended before it sent the configuration
    mailbox = Mailbox()
    threading.Thread(
        target=_read_commands, args=(connection, mailbox), name="commands", daemon=True
    ).start()
    reports = FrameWriter(connection, on_broken=lambda: os._exit(PARENT_GONE))
    try:
        return _serve(start, mailbox, reports.put)
    finally:
        reports.close()


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Let torch grow the segments of a CUDA device's memory, unless a variable says otherwise.

    Steps of many sizes would leave gaps between segments of fixed size. Torch reads the variables
    when it first allocates on the device; before torch 2.9 it knows the second alone.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in environment for name in names):
        environment[names[1]] = "expandable_segments:True"


def _serve(start: _Start, mailbox: Mailbox, emit: Callable[[Report], None]) -> int:
    from tokenmill_worker.engine.engine import Engine
    from tokenmill_worker.engine.process.loop import EngineLoop

    lengthen_slices()  # for this thread and the compute threads it starts, not for the I/O threads
    forwarder = _LoadLogForwarder(emit)
    try:
        engine = Engine.load(
            start.config,
            cache_dir=start.cache_dir,
            on_progress=lambda message, fraction: emit(LoadProgress(message, fraction)),
        )
    except Exception as error:
        emit(EngineFailed(why(error), at_start=True, may_pass=lacks_memory(error)))
        return 1
    finally:
        forwarder.loaded()
    gc.collect()
    gc.freeze()  # else every full collection would walk model and libraries during a step
    EngineLoop(engine, mailbox, emit).run()
    return 0


class _LoadLogForwarder(logging.Handler):
    """Forwards log records to the worker, which writes them to its log: this process has no log.

    Warnings of any library are forwarded until the process ends. Messages of the engine about
    loading (compiled kernels, the layout of weights) are forwarded until `loaded`.
    """

    def __init__(self, emit: Callable[[Report], None]) -> None:
        super().__init__(logging.INFO)
        self._report = emit
        logging.getLogger().addHandler(self)
        logging.captureWarnings(True)
        logging.getLogger("tokenmill_worker.engine").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self._report(Logged(record.levelno, record.name, record.getMessage()))

    def loaded(self) -> None:
        logging.getLogger("tokenmill_worker.engine").setLevel(logging.NOTSET)


def _receive(connection: socket.socket) -> bytes:
    """Receive one frame.

    Raises:
        EOFError: the stream has ended.
    """
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
    arrivals = select.poll()  # unlike recv, poll does not wake when the worker reads our data
    arrivals.register(connection, select.POLLIN)
    try:
        while arrivals.poll():
            mailbox.put(read_command(_receive(connection)))
    except (EOFError, OSError):
        os._exit(PARENT_GONE)  # the result of the running step has no receiver
    except FrameError as error:
        os.write(2, f"the engine process ends: {error}\n".encode())
        os._exit(4)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
