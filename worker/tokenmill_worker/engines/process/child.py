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
import traceback
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Final, NoReturn

import msgspec

from tokenmill_worker.contract.engine_kind import EngineConfigError
from tokenmill_worker.contract.messages import (
    MAX_FRAME_BYTES,
    EngineFailed,
    FrameError,
    LoadProgress,
    Logged,
    Mailbox,
    Ready,
    Report,
    Start,
    read_command,
    read_start,
)
from tokenmill_worker.engines import KINDS, missing_packages, raised_by, serve_of
from tokenmill_worker.engines.process.death import end_group
from tokenmill_worker.engines.process.socket_frames import LENGTH_BYTES, FrameWriter

FAILED, PARENT_GONE, WRONG_FRAME = 1, 3, 4  # exit statuses
LONGEST: Final = 600  # characters of a reason why the engine has failed
log = logging.getLogger(__name__)
_NO_COMMANDS = b"the engine process ends: it cannot receive a command, or lacks memory for it\n"


def main(descriptor: int) -> int:
    """Serve the engine that the first frame names; return the exit status."""
    gc.disable()  # until the imports are done: collections take a quarter of their time
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
    reports = FrameWriter(connection, on_broken=_end_group)
    try:
        start = read_start(_receive(connection))
    except (EOFError, OSError):
        reports.close()
        return PARENT_GONE  # it ended before it sent the settings
    except FrameError as error:
        reports.put(EngineFailed(str(error), at_start=True))
        reports.close()
        return WRONG_FRAME
    reports.put(LoadProgress("importing the engine", 0.0))
    try:
        words = missing_packages(start.engine)
    except EngineConfigError as error:  # a package that is not here
        words = str(error)
    if words:
        reports.put(EngineFailed(words, at_start=True))
        reports.close()
        return FAILED
    mailbox = Mailbox()
    threading.Thread(
        target=_read_commands, args=(connection, mailbox), name="commands", daemon=True
    ).start()
    logging.getLogger().addHandler(_LogForwarder(reports.put))
    logging.captureWarnings(True)
    try:
        return _serve(start, mailbox, partial(_report, reports))
    finally:
        reports.close()


def _report(reports: FrameWriter, report: Report) -> None:
    """Send a report. Before an engine's first, which says that its imports are done, and before it
    is ready, exclude from later collections what is there: they would walk libraries and model.
    """
    is_ready = isinstance(report, Ready)
    if is_ready:
        gc.collect()
    if is_ready or not gc.isenabled():
        gc.freeze()
        gc.enable()
    reports.put(report)


def _serve(start: Start, mailbox: Mailbox, emit: Callable[[Report], None]) -> int:
    try:
        serve = serve_of(start.engine)
    except EngineConfigError as error:
        emit(EngineFailed(str(error), at_start=True))
        return FAILED
    is_ready = False

    def pass_on(report: Report) -> None:
        nonlocal is_ready
        is_ready |= isinstance(report, Ready)
        if isinstance(report, EngineFailed):
            report = msgspec.structs.replace(report, message=in_one_line(report.message))
        emit(report)

    try:
        return serve(start, mailbox, pass_on)
    except Exception as error:  # a package of anybody's may raise any
        if start.engine in KINDS:
            raise  # a fault of ours, whose traceback belongs in a report
        emit(Logged(logging.DEBUG, __name__, traceback.format_exc()))
        words = raised_by(start.engine, error)
        is_full = isinstance(error, MemoryError)
        emit(EngineFailed(words, at_start=not is_ready, may_pass=is_full))
        return FAILED


def in_one_line(words: str) -> str:
    """Return a library's words in one line, of whole sentences if they are long; the log then has
    them all.
    """
    words = " ".join(words.split())
    if len(words) <= LONGEST:
        return words
    log.error("%s", words)
    return words[:LONGEST].rpartition(". ")[0] or words[:LONGEST]


def _end_group() -> NoReturn:
    """End at once, with every process that the engine has started."""
    try:
        if os.getpgrp() == os.getpid():  # as the worker starts it
            end_group(os.getpid())
    finally:
        os._exit(PARENT_GONE)


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Let torch grow the segments of a CUDA device's memory, unless a variable says otherwise.

    Steps of many sizes would leave gaps between segments of fixed size. Torch reads the variables
    when it first allocates on the device; before torch 2.9 it knows the second alone.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in environment for name in names):
        environment[names[1]] = "expandable_segments:True"


class _LogForwarder(logging.Handler):
    """Forwards log records to the worker, which writes them to its log: this process has no log.

    Warnings of any library are forwarded, and what an engine asks for by the level of its logger.
    """

    def __init__(self, emit: Callable[[Report], None]) -> None:
        super().__init__(logging.INFO)
        self._report = emit

    def emit(self, record: logging.LogRecord) -> None:
        self._report(Logged(record.levelno, record.name, record.getMessage()))


def _receive(connection: socket.socket) -> bytes:
    """Receive one frame.

    Raises:
        EOFError: the stream has ended.
        FrameError: the frame is longer than any command.
    """
    length = int.from_bytes(_receive_exactly(connection, LENGTH_BYTES), "little")
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is announced")
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
        _end_group()  # the result of the running step has no receiver
    except FrameError as error:
        os.write(2, f"the engine process ends: {error}\n".encode())
        os._exit(WRONG_FRAME)
    except BaseException:  # a loop that gets no commands would look idle for ever
        os.write(2, _NO_COMMANDS)
        _end_group()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
