"""Runs kernels by a pool of threads, several of them in one call.

The arguments belong to the caller, who fills them in before each run. Every calling thread has
helper threads of its own in C++ (`program.cpp`). A run ends when its units of work are done, not
when its threads are: a helper without a core delays no run (`work_stealing.h`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tokenmill_worker.engines.own.cpu.kernels.library import load


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call of a program; `member` is the kernel's `tokenmill_…_member`, run by each
    thread.
    """

    member: Any
    arguments: ctypes.Structure


class RowArguments(ctypes.Structure):
    """Arguments that move rows from one buffer to another; the fields match the struct in
    program.cpp.

    Row `from_rows[i]` becomes row `to_rows[i]`; a null pointer stands for row i. `limit` is the
    number of source rows: with one, the call returns −1 where an entry of `from_rows` is beyond it.
    """

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("source", "target", "from_rows", "to_rows")),
        *((name, c_int64) for name in ("count", "width", "limit")),
    ]


def move_rows(arguments: RowArguments) -> KernelCall:
    return KernelCall(load("program").tokenmill_move_rows_member, arguments)


class _Call(ctypes.Structure):
    """One kernel call; the fields match the struct in program.cpp."""

    _fields_: ClassVar = [("member", c_void_p), ("arguments", c_void_p)]


class Caller:
    """Runs one kernel at a time; raises KernelUnavailableError where the program cannot be
    compiled.
    """

    __slots__ = ("_run",)

    def __init__(self, cache_dir: Path | None = None, march: str = "native") -> None:
        self._run = _runner(cache_dir, march)

    def __call__(self, member: Any, arguments: ctypes.Structure, num_threads: int) -> int:
        """Run the kernel and return its answer, which is 0 when it is done."""
        call = _Call(ctypes.cast(member, c_void_p), ctypes.addressof(arguments))
        answer = c_int64()
        self._run(
            ctypes.byref(call),
            c_int64(0),
            c_int64(1),
            c_int64(num_threads),
            ctypes.byref(answer),
        )
        return answer.value


def _runner(cache_dir: Path | None, march: str) -> Any:
    run = load("program", cache_dir, march).tokenmill_run
    run.restype = c_int64
    return run


class Program:
    """A sequence of kernel calls that runs as one; raises KernelUnavailableError where it cannot be
    compiled.
    """

    def __init__(
        self,
        steps: Sequence[KernelCall],
        cache_dir: Path | None = None,
        march: str = "native",
    ) -> None:
        self._run = _runner(cache_dir, march)
        self._steps = tuple(steps)  # keeps the arguments alive
        self._calls = (_Call * len(steps))(
            *(
                _Call(ctypes.cast(step.member, c_void_p), ctypes.addressof(step.arguments))
                for step in steps
            )
        )
        self._answer = c_int64()
        self._answer_at = ctypes.byref(self._answer)
        self._count = len(steps)

    def run(
        self, num_threads: int, on_answer: Callable[[int], None], stop: int | None = None
    ) -> None:
        """Run the calls [0, stop), or all of them.

        A call returns a number if its workspace is too small. It is repeated after `on_answer` has
        met that need; if `on_answer` raises, the run ends.
        """
        last = self._count if stop is None else stop
        threads, count = c_int64(num_threads), c_int64(last)
        at = self._run(self._calls, c_int64(0), count, threads, self._answer_at)
        while at < last:
            on_answer(self._answer.value)
            at = self._run(self._calls, c_int64(at), count, threads, self._answer_at)
