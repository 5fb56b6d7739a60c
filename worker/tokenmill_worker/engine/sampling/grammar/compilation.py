"""One compilation on a thread of its own, and its limits.

The limit of work is the thread's CPU time, so a busy machine refuses no grammar that an idle one
compiles. A second limit, of time, ends what waits too long for a CPU: it may be tried again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tokenmill_worker.engine.sampling.grammar.errors import LATER, GrammarError
from tokenmill_worker.engine.sampling.grammar.sources import sentence

_LEAST_WAIT_S: Final = 0.02
_LOWEST_PRIORITY: Final = 19


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of compiling.

    `cpu_s` and `wall_s` are those of one grammar. `threads` compile at once, `threads_each` of them
    for one tenant. Nothing is compiled while `stuck` threads go on beyond their limits, or
    `stuck_each` of one tenant. The newest grammars are cached: so many, and as many as have
    `cached_chars` together (one takes up to 300 bytes for each character).
    """

    cpu_s: float = 10.0
    wall_s: float = 60.0
    threads: int = 3
    threads_each: int = 2
    stuck: int = 8
    stuck_each: int = 4
    cached: int = 256
    cached_chars: int = 1_000_000


class Compilation:
    """Compiles one grammar.

    Args:
        compile_one: returns the compiled grammar, or raises.
        settled: called once with the grammar or the problem, and whether the thread goes on.
        ended: called when a thread that went on has ended.
    """

    def __init__(
        self,
        compile_one: Callable[[], Any],
        limits: CompileLimits,
        settled: Callable[[Any, GrammarError | None, bool], None],
        ended: Callable[[], None],
    ) -> None:
        self._compile, self._limits = compile_one, limits
        self._settled, self._ended = settled, ended
        self._lock = threading.Lock()
        self._is_settled = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="grammar", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises GrammarError where there is none; then nothing is called."""
        _start(self._thread)

    def _work(self) -> None:
        compiled, problem = None, None
        try:
            # without its limits nothing is compiled
            _start(threading.Thread(target=self._watch, name="grammar limit", daemon=True))
            compiled = self._compile()
        except Exception as error:
            problem = _problem(error)
        with self._lock:
            is_late, self._is_settled = self._is_settled, True
        self._is_over.set()
        if is_late:
            self._ended()
        else:
            self._settled(compiled, problem, False)

    def _watch(self) -> None:
        begun_s = time.monotonic()
        wait_s = min(self._limits.cpu_s, self._limits.wall_s)
        while not self._is_over.wait(max(wait_s, _LEAST_WAIT_S)):
            with self._lock:
                if self._is_settled:
                    return
                left_s = self._limits.cpu_s - self._cpu_s()
                waited_s = self._limits.wall_s - (time.monotonic() - begun_s)
                wait_s = min(left_s, waited_s)
                if wait_s > 0:
                    continue
                self._is_settled = True
                self._yield_to_others()
            self._settled(None, self._passed(left_s <= 0), True)
            return

    def _cpu_s(self) -> float:
        """Return the CPU time of the thread. It runs: the caller holds the lock, before which a
        thread does not end.
        """
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def _yield_to_others(self) -> None:
        """Let a thread that nobody waits for run only where a CPU is idle."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, _LOWEST_PRIORITY)

    def _passed(self, is_work: bool) -> GrammarError:
        if is_work:
            return GrammarError(f"the grammar took more than {self._limits.cpu_s:g} s to compile")
        return GrammarError(
            f"the machine was too busy to compile the grammar within {self._limits.wall_s:g} s; "
            "try again later",
            LATER,
        )


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise GrammarError(
            "the machine has no thread left to compile the grammar; try again later", LATER
        ) from error


def _problem(error: Exception) -> GrammarError:
    if isinstance(error, GrammarError):
        return error
    if isinstance(error, MemoryError):
        return GrammarError(
            "the memory was too short to compile the grammar; try again later", LATER
        )
    return GrammarError(sentence(error))
