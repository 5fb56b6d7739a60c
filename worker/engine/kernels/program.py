"""Kernel calls by a team of threads, a row of them as one call. The arguments stay the caller's, who fills them in
before each run.

Every calling thread has helpers of its own in C++ (`program.cpp`). A run waits for its units of work, not for its
threads: a helper that has no core keeps nobody waiting (`team.h`).
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from worker.engine.kernels.library import load


@dataclass(frozen=True, slots=True)
class Step:
    """`member` is a kernel's entry for one thread of a team, `tokenmill_…_member`."""

    member: Any
    arguments: ctypes.Structure


class RowArguments(ctypes.Structure):
    """As in program.cpp: row `from_rows[i]` of one buffer becomes row `to_rows[i]` of another; null: row i. With a
    `limit`, the number of rows there are, a call answers −1 where one of `from_rows` is beyond it.
    """

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("source", "target", "from_rows", "to_rows")),
        *((name, c_int64) for name in ("count", "width", "limit")),
    ]


def move_rows(arguments: RowArguments) -> Step:
    return Step(load("program").tokenmill_move_rows_member, arguments)


class _Call(ctypes.Structure):
    """As in program.cpp."""

    _fields_: ClassVar = [("member", c_void_p), ("arguments", c_void_p)]


class Caller:
    """Runs one kernel at a time. Raises KernelUnavailableError where the program cannot be compiled."""

    __slots__ = ("_run",)

    def __init__(self, cache_dir: Path | None = None, march: str = "native") -> None:
        self._run = _runner(cache_dir, march)

    def __call__(self, member: Any, arguments: ctypes.Structure, num_threads: int) -> int:
        """What the kernel answers: 0 when done."""
        call = _Call(ctypes.cast(member, c_void_p), ctypes.addressof(arguments))
        answer = c_int64()
        self._run(ctypes.byref(call), c_int64(0), c_int64(1), c_int64(num_threads), ctypes.byref(answer), None)
        return answer.value


def _runner(cache_dir: Path | None, march: str) -> Any:
    run = load("program", cache_dir, march).tokenmill_run
    run.restype = c_int64
    return run


class KernelTimes:
    """What watched programs spend in each kernel, by its name: seconds as their caller sees them, from the end of the
    call before it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def add(self, names: Iterable[str], begun_ns: int, ended_ns: Iterable[int]) -> None:
        for name, end_ns in zip(names, ended_ns, strict=True):
            self.seconds[name] += (end_ns - begun_ns) / 1e9
            begun_ns = end_ns


class Program:
    """Raises KernelUnavailableError where it cannot be compiled. `times` are told of every run, where there are any."""

    def __init__(
        self,
        steps: Sequence[Step],
        cache_dir: Path | None = None,
        march: str = "native",
        times: KernelTimes | None = None,
    ) -> None:
        self._run = _runner(cache_dir, march)
        self._times = times
        self._ended = None if times is None else (c_int64 * len(steps))()
        self._steps = tuple(steps)  # keeps the arguments alive
        self._calls = (_Call * len(steps))(
            *(_Call(ctypes.cast(step.member, c_void_p), ctypes.addressof(step.arguments)) for step in steps)
        )
        self._answer = c_int64()
        self._answer_at = ctypes.byref(self._answer)
        self._count = len(steps)

    def run(self, num_threads: int, on_answer: Callable[[int], None], stop: int | None = None) -> None:
        """Calls [0, stop). One that answers (a workspace too small) is repeated after `on_answer` has met its need, or
        not at all if that raises.
        """
        last = self._count if stop is None else stop
        threads, count, ended = c_int64(num_threads), c_int64(last), self._ended
        begun_ns = 0 if ended is None else time.monotonic_ns()
        at = self._run(self._calls, c_int64(0), count, threads, self._answer_at, ended)
        while at < last:
            on_answer(self._answer.value)
            at = self._run(self._calls, c_int64(at), count, threads, self._answer_at, ended)
        if ended is not None and self._times is not None:
            names = (step.member.__name__ for step in self._steps[:last])
            self._times.add(names, begun_ns, ended[:last])
