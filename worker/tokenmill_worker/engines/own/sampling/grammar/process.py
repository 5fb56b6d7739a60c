"""Asks the process that compiles grammars; starts it, and replaces it where it has ended."""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tokenmill_worker.engines.own.sampling.grammar.errors import LATER, GrammarError
from tokenmill_worker.engines.own.sampling.grammar.messages import (
    CompileAnswer,
    CompileQuestion,
    CompileSetup,
    receive,
    send,
)

log = logging.getLogger(__name__)

_CHILD: Final = "tokenmill_worker.engines.own.sampling.grammar.child"
_START_LIMIT_S: Final = 300.0
_SPARE_S: Final = 10.0  # beyond the limit of time, which the other process keeps


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of compiling.

    `cpu_s`, `wall_s` and `memory_bytes` are those of one grammar. `threads` compile at once,
    `threads_each` of them for one tenant. The newest grammars are cached: so many, and as many as
    have `cached_chars` together (one takes up to 300 bytes for each character).
    """

    cpu_s: float = 10.0
    wall_s: float = 60.0
    memory_bytes: int = 2 * 2**30
    threads: int = 3
    threads_each: int = 2
    cached: int = 256
    cached_chars: int = 1_000_000


@dataclass(slots=True)
class _Parts:
    """The process, the socket that takes requests for workers, and the workers that wait."""

    process: subprocess.Popen[bytes] | None = None
    control: socket.socket | None = None
    idle: list[socket.socket] = field(default_factory=list)

    def end(self) -> None:
        for each in (self.control, *self.idle):
            if each is not None:
                each.close()
        self.idle.clear()
        if self.process is not None:
            self.process.kill()  # and with it its workers
            self.process.wait()
        self.process = self.control = None


class GrammarProcess:
    """The process that compiles grammars, for several threads. It starts with the first grammar, or
    with `start`, and ends with `close`.
    """

    def __init__(self, info: Any, special_ids: Sequence[int], limits: CompileLimits) -> None:
        self._info, self._special_ids, self._limits = info, list(special_ids), limits
        self._lock = threading.Lock()
        self._parts = _Parts()
        self._end = weakref.finalize(self, self._parts.end)

    @property
    def pid(self) -> int | None:
        process = self._parts.process
        return None if process is None else process.pid

    def start(self, *, wait: bool = False) -> None:
        """Start in the background, or `wait` until it is ready or has failed."""
        if wait:
            self._prepare()
        else:
            threading.Thread(target=self._prepare, name="grammar process", daemon=True).start()

    def close(self) -> None:
        if (process := self._parts.process) is not None:
            process.kill()  # it may be starting, with the lock
        with self._lock:
            self._end()

    def compiled(self, kind: str, source: str) -> str:
        """Compile a grammar there; return it serialised, or "" if it is to be compiled here, which
        is known to end. Raises GrammarError.
        """
        try:
            worker = self._take()
        except (OSError, EOFError) as error:
            log.warning("The process that compiles grammars does not start: %s", error)
            raise GrammarError(
                "the process that compiles grammars does not start; try again later", LATER
            ) from error
        try:
            send(worker, CompileQuestion(kind, source))
            answer = msgspec.msgpack.decode(receive(worker), type=CompileAnswer)
        except (OSError, EOFError):
            answer = CompileAnswer(signal=signal.SIGKILL)
        self._give_back(worker, has_ended=bool(answer.signal) or answer.is_last)
        if answer.signal:
            raise self._ended(answer.signal)
        if answer.problem:
            raise GrammarError(answer.problem, answer.code)
        return answer.compiled

    def _ended(self, by: int) -> GrammarError:
        limits = self._limits
        if by == signal.SIGPROF:
            return GrammarError(f"the grammar took more than {limits.cpu_s:g} s to compile")
        if by == signal.SIGALRM:
            return GrammarError(
                f"the machine was too busy to compile the grammar within {limits.wall_s:g} s; "
                "try again later",
                LATER,
            )
        if by == signal.SIGKILL:
            return GrammarError(
                "the process that compiled the grammar was ended; try again later", LATER
            )
        return GrammarError(
            "the grammar cannot be compiled: its rules are too many, nested too deep, or stand for "
            "themselves"
        )

    def _prepare(self) -> None:
        with contextlib.suppress(OSError, EOFError), self._lock:
            self._ensure_started()

    def _take(self) -> socket.socket:
        with self._lock:
            self._ensure_started()
            while self._parts.idle:
                worker = self._parts.idle.pop()
                if not _has_ended(worker):
                    return worker
                worker.close()
            return self._new_worker()

    def _give_back(self, worker: socket.socket, *, has_ended: bool) -> None:
        with self._lock:
            if not has_ended:
                self._parts.idle.append(worker)
                return
            worker.close()
            with contextlib.suppress(OSError):  # where all has ended, the next grammar starts it
                self._parts.idle.append(self._new_worker())

    # ── the rest is called with the lock ──

    def _ensure_started(self) -> None:
        parts = self._parts
        if not self._end.alive:
            raise EOFError("it is closed")
        if parts.process is not None and parts.process.poll() is None:
            return
        parts.end()
        parts.control, theirs = socket.socketpair()
        with theirs:
            parts.process = subprocess.Popen(
                [sys.executable, "-m", _CHILD],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C reaches the worker alone
            )
        limits = self._limits
        parts.control.settimeout(_START_LIMIT_S)
        send(
            parts.control,
            CompileSetup(
                self._info.serialize_json(),
                self._special_ids,
                limits.cpu_s,
                limits.wall_s,
                limits.memory_bytes,
            ),
        )
        if not parts.control.recv(1):
            raise EOFError("it has ended")
        parts.idle += [self._new_worker() for _ in range(limits.threads)]

    def _new_worker(self) -> socket.socket:
        if self._parts.control is None:
            raise OSError("it has ended")
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._parts.control, [b"\0"], [theirs.fileno()])
        ours.settimeout(self._limits.wall_s + _SPARE_S)
        return ours


def _has_ended(worker: socket.socket) -> bool:
    """Return whether there is something to read of a worker that was not asked."""
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    return bool(poll.poll(0))
