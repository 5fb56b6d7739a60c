"""Teams of threads do every unit once and phases in order; a stopped thread delays no other."""

from __future__ import annotations

import ctypes
import json
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar

import pytest

from tests.engines.own.cpu.kernels.compiled import compiled
from tests.engines.own.cpu.kernels.layer import refuse
from tokenmill_worker.engines.own.cpu.kernels.program import KernelCall, Program


class CountArguments(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("counts", "computed", "stalled", "gave_up", "released")),
        *((name, c_int64) for name in ("units", "grain")),
        *((name, c_int32) for name in ("commits", "stalls_at", "stalls_second", "sleep_us")),
    ]


class CheckArguments(ctypes.Structure):
    _fields_: ClassVar = [("of", c_void_p), ("flag", c_void_p), ("refuses", c_int32)]


class Phase:
    """A kernel of `units` units, followed by a check that each was done once."""

    def __init__(
        self,
        units: int,
        grain: int = 1,
        *,
        commits: bool = False,
        stalls_at: int = -1,
        stalls_second: bool = False,
        sleep_us: int = 0,
    ) -> None:
        self.counts = (c_int32 * max(units, 1))()
        self.computed, self.stalled, self.gave_up, self.reached = (c_int32() for _ in range(4))
        self.count = CountArguments(
            counts=ctypes.addressof(self.counts), computed=ctypes.addressof(self.computed),
            stalled=ctypes.addressof(self.stalled), gave_up=ctypes.addressof(self.gave_up),
            released=ctypes.addressof(self.reached), units=units, grain=grain,
            commits=commits, stalls_at=stalls_at, stalls_second=stalls_second, sleep_us=sleep_us,
        )  # fmt: skip
        self.check = CheckArguments(
            of=ctypes.addressof(self.count), flag=ctypes.addressof(self.reached)
        )

    def steps(self) -> list[KernelCall]:
        return [
            KernelCall(library().count_member, self.count),
            KernelCall(library().check_member, self.check),
        ]


def library() -> ctypes.CDLL:
    return compiled("work_stealing_members")


def run(phases: list[Phase], threads: int) -> None:
    Program([step for phase in phases for step in phase.steps()]).run(threads, refuse)


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_unit_of_work_is_done_once(threads: int, commits: bool) -> None:
    phases = [
        Phase(units, grain, commits=commits)
        for units in (0, 1, 2, 3, 7, 64, 1000)
        for grain in (1, 2, 8)
    ]
    run(phases, threads)
    assert all(count == 1 for phase in phases if phase.count.units for count in phase.counts)


@pytest.mark.parametrize("stalls_at", [0, 3, 4, 7])
@pytest.mark.parametrize("threads", [2, 4])
def test_a_thread_stopped_in_a_unit_does_not_delay_the_others(threads: int, stalls_at: int) -> None:
    """The thread stands still until a later phase, so another thread must do its unit."""
    stalling = Phase(8, commits=True, stalls_at=stalls_at)
    later = [
        Phase(units, grain, commits=bool(units % 2)) for units in (5, 1, 40) for grain in (1, 3)
    ]
    run([stalling, *later], threads)
    assert stalling.stalled.value > 1
    assert stalling.gave_up.value == 0
    assert stalling.computed.value > 8
    assert list(stalling.counts) == [1] * 8


@pytest.mark.parametrize("threads", [2, 4])
def test_the_first_of_two_results_of_a_unit_is_used(threads: int) -> None:
    """The thread that began the unit goes on as soon as another thread computes it again.

    The second thread then stands still until a later phase.
    """
    stalling = Phase(8, commits=True, stalls_at=3, stalls_second=True)
    run([stalling, Phase(5), Phase(40, commits=True)], threads)
    assert stalling.stalled.value > 1
    assert stalling.gave_up.value == 0
    assert list(stalling.counts) == [1] * 8


def test_a_unit_that_stores_its_own_results_is_never_computed_twice() -> None:
    phase = Phase(64, commits=False, sleep_us=2_000)
    run([phase], 3)
    assert phase.computed.value == 64


@pytest.mark.parametrize("rounds", [15, pytest.param(60, marks=pytest.mark.long)])
def test_more_threads_than_cores_do_every_unit_once(rounds: int) -> None:
    """More threads than cores, and sleeps at random places."""
    seed = random.Random(rounds)
    for _ in range(rounds):
        phases = [
            Phase(seed.randrange(60), seed.choice((1, 2, 4)), commits=seed.random() < 0.5,
                  sleep_us=seed.choice((0, 0, 20, 300)))
            for _ in range(seed.randrange(1, 8))
        ]  # fmt: skip
        run(phases, seed.choice((2, 3, 6, 9)))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_program_that_was_refused_continues_at_the_refused_phase(threads: int) -> None:
    first, second = Phase(20), Phase(30, commits=True)
    first.check.refuses = 2
    answers: list[int] = []
    Program([*first.steps(), *second.steps()]).run(threads, answers.append)
    assert answers == [1002, 1001]
    assert list(first.counts) == [1] * 20
    assert list(second.counts) == [1] * 30


@pytest.mark.parametrize("rounds", [10, pytest.param(50, marks=pytest.mark.long)])
def test_concurrent_callers_have_their_own_threads(rounds: int) -> None:
    def many(_: int) -> None:
        for _ in range(rounds):
            run([Phase(33, 2, commits=True), Phase(9)], 3)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(many, range(4)))


def test_a_forked_process_starts_its_own_threads() -> None:
    script = """
import os, sys
from tests.engines.own.cpu.kernels.test_work_stealing import Phase, run
run([Phase(100)], 3)
child = os.fork()
run([Phase(100, commits=True)], 3)
if not child:
    sys.exit(0)  # an ordinary end, with what the C++ side does then
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    root = Path(__file__).parents[5]
    library()
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_helper_thread_receives_fault_signals_and_no_others() -> None:
    """A blocked fault signal ends the process at once, so no handler could report its place.

    A new process has no threads but its first one and the helpers. All signals of a thread are
    blocked until it has begun: then helpers count units.
    """
    script = """
import json
from pathlib import Path
from tests.engines.own.cpu.kernels.test_work_stealing import Phase, run
begun = Phase(8, commits=True, stalls_at=3)  # stands still until the helper does its unit
run([begun, Phase(40)], 2)
assert begun.stalled.value > 1
blocked = []
for task in Path("/proc/self/task").iterdir():
    lines = (task / "status").read_text().splitlines()
    blocked += [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
print(json.dumps(blocked))
"""
    root = Path(__file__).parents[5]
    library()
    printed = subprocess.run(
        [sys.executable, "-c", script], cwd=root, timeout=60, capture_output=True, check=True
    )
    masks = [
        {number for number in range(1, 32) if blocked >> (number - 1) & 1}
        for blocked in json.loads(printed.stdout)
    ]
    helpers = [mask for mask in masks if signal.SIGTERM in mask]
    assert helpers
    for mask in helpers:
        assert not mask & {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
        assert {signal.SIGINT, signal.SIGCHLD, signal.SIGALRM} <= mask
