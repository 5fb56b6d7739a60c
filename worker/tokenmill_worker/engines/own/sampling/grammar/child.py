"""The process that compiles grammars, so that none can hold up or end the engine.

It reads the vocabulary, then waits. For each socket that the engine sends it forks a process, which
compiles the grammars that come through this socket. The kernel limits its memory, and the time of
each grammar. A process that ends takes nothing with it: its parent tells the engine the signal, and
forks the next. Everything ends with the engine, whose end closes the sockets.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Final

import msgspec

from tokenmill_worker.engines.own.sampling.grammar.errors import GrammarError
from tokenmill_worker.engines.own.sampling.grammar.libraries import Libraries
from tokenmill_worker.engines.own.sampling.grammar.messages import (
    CompileAnswer,
    CompileQuestion,
    CompileSetup,
    receive,
    send,
)
from tokenmill_worker.engines.own.sampling.grammar.sources import sentence
from tokenmill_worker.system.parent_death import end_with

_LIFE_S: Final = 1.0  # CPU seconds of a process; one that has worked long may hold much memory
_FAULT: Final = "invalid_request"
_MAX_COMPILED: Final = 128 * 2**20  # bytes that the engine reads, and keeps


def main() -> None:
    import xgrammar

    engine = socket.socket(fileno=0)
    setup = msgspec.msgpack.decode(receive(engine), type=CompileSetup)
    info = xgrammar.TokenizerInfo.deserialize_json(setup.info)
    libraries = Libraries(info, setup.special_ids, None)
    children: dict[int, socket.socket] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _tell_ended(children))
    gc.freeze()  # keeps the pages shared with the forked processes
    try:
        engine.sendall(b"\0")  # ready
    except (BrokenPipeError, ConnectionResetError):  # the engine has ended meanwhile
        return
    while True:
        _, fds, _, _ = socket.recv_fds(engine, 1, 1)
        if not fds:
            return
        questions = socket.socket(fileno=fds[0])
        # its end is told once it is known
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            _become_worker(parent, [engine, *children.values()], questions, libraries, setup)
        if pid > 0:
            children[pid] = questions
        else:
            questions.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _tell_ended(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as answers, contextlib.suppress(OSError):
            answers.setblocking(False)
            send(answers, CompileAnswer(signal=os.WTERMSIG(status) or signal.SIGKILL))


def _become_worker(
    parent: int,
    others: list[socket.socket],
    questions: socket.socket,
    libraries: Libraries,
    setup: CompileSetup,
) -> None:
    """Answer questions until the engine closes the socket; never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        end_with(parent)
        for other in others:
            other.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # a library that aborts writes there
            os.dup2(nothing, fd)
        _limit_memory(setup.memory_bytes)
        _answer_all(questions, libraries, setup)
    finally:
        os._exit(0)


def _limit_memory(num_bytes: int) -> None:
    """Limit what is added to the memory of this process. Where the machine's memory is short, Linux
    ends this process before others.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        Path("/proc/self/oom_score_adj").write_text("1000")


def _answer_all(questions: socket.socket, libraries: Libraries, setup: CompileSetup) -> None:
    begun_s, is_last = time.process_time(), False
    while not is_last:
        question = msgspec.msgpack.decode(receive(questions), type=CompileQuestion)
        # the signals end the process, whatever a library does
        signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)
        signal.setitimer(signal.ITIMER_REAL, setup.wall_s)
        answer = _answer(libraries, question, setup)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_last = answer.is_last = time.process_time() - begun_s > _LIFE_S
        send(questions, answer)


def _answer(libraries: Libraries, question: CompileQuestion, setup: CompileSetup) -> CompileAnswer:
    try:
        compiled = libraries.tried(question.kind, question.source)
        if len(compiled) > _MAX_COMPILED:
            raise GrammarError("the grammar is too large once it is compiled")
    except Exception as error:
        code = error.code if isinstance(error, GrammarError) else _FAULT
        return CompileAnswer(problem=_sentence(error, setup), code=code)
    return CompileAnswer(compiled=compiled)


def _sentence(error: Exception, setup: CompileSetup) -> str:
    if isinstance(error, GrammarError):
        return str(error)
    if isinstance(error, MemoryError) or str(error) == "std::bad_alloc":
        gib = setup.memory_bytes / 2**30
        return f"the grammar took more than {gib:.2g} GiB of memory to compile"
    return f"the grammar cannot be compiled: {sentence(error)}"


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        main()
