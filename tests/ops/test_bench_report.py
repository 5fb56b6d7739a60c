"""A comparison's report: tables of 80 columns, figures of complete rounds, disturbed rounds."""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from ops.benchmarks.compare.report import Report, show_summary, turn_line
from ops.benchmarks.compare.rounds import Measurement, Turn
from ops.benchmarks.measure.disturbance import CoreWatch, Disturbance, wait_until_quiet
from ops.benchmarks.measure.figures import of_round
from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.measure.workload_files import Workload, WorkloadRequest

WORKLOAD = Workload("decode", (WorkloadRequest((1, 2, 3), 4), WorkloadRequest((4,), 4)))
NAMES = ("tokenmill", "transformers", "vllm", "llamacpp", "static", "floor")


def turn(
    seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4), disturbance: Disturbance | None = None
) -> Turn:
    answers = [list(tokens), list(tokens)]
    measured = Round(
        seconds,
        answers,
        [0.25 * seconds] * 2,
        [seconds] * 2,
        steps=4,
        computed_tokens=8,
        batch_sizes=[2],
    )
    return Turn(measured, of_round(WORKLOAD, measured), disturbance)


def measurement(**seconds: list[float]) -> Measurement:
    found = Measurement(WORKLOAD, NAMES)
    for name in NAMES:
        found.turns[name] = [turn(each) for each in seconds.get(name, [4.0, 4.0])]
    return found


@pytest.fixture
def console() -> Console:
    return Console(width=80, file=io.StringIO())


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestResults:
    def test_ratios_are_of_rounds_and_only_of_those_that_all_finished(self) -> None:
        both = measurement(tokenmill=[2.0, 1.0, 0.5], vllm=[4.0, 4.0])
        found = both.results()
        assert found["vllm"]["ratios"] == [2.0, 4.0]
        assert found["vllm"]["ratio"] == 3.0
        assert len(both.rounds["tokenmill"]) == 3, "what was measured is kept"
        assert found["tokenmill"]["wall_s"] == 1.5
        assert found["tokenmill"]["spread"] == pytest.approx(4.0 / 6.0)

    def test_a_difference_in_any_round_counts(self, console: Console) -> None:
        both = measurement()
        report = Report(console, lambda _: None, rounds=2)
        report.begin(both)
        assert report.is_equal(lambda _: True)
        both.turns["vllm"][1] = turn(4.0, tokens=(1, 2, 9, 4))
        assert not report.is_equal(lambda _: True)
        assert report.is_equal(lambda name: name != "vllm"), "of an engine that may differ"
        assert both.results()["vllm"]["same"] == "0/2"
        assert both.results()["vllm"]["equal_tokens"] == 0.5

    def test_floors_have_no_tokens_to_compare(self, console: Console) -> None:
        both = measurement()
        both.turns["floor"][0] = turn(4.0, tokens=(100, 100, 100, 100))
        report = Report(console, lambda _: None, rounds=2)
        report.begin(both)
        assert report.is_equal(lambda _: True)
        assert "same" not in both.results()["floor"]

    def test_before_the_first_round_ends_there_are_no_results(self) -> None:
        assert measurement(vllm=[]).results() == {}


class TestTables:
    def test_six_engines_fit_in_80_columns(self, console: Console) -> None:
        kept: list[dict[str, Any]] = []
        report = Report(console, kept.append, rounds=2)
        whole = measurement(tokenmill=[0.01, 0.02], transformers=[1234.5, 1000.0])
        report.begin(whole)("tokenmill", whole.turns["tokenmill"][0])
        report.show()
        text = text_of(console)
        assert "…" not in text
        table = text[text.index("decode: ") : text.index("tokenmill: ")].splitlines()
        assert max(map(len, table)) <= 80
        rows = [line for line in table if line.startswith(NAMES)]
        assert [row[:13].strip() for row in rows] == list(NAMES), "a row each, none of them wrapped"
        assert kept[-1]["complete"] is False
        assert list(kept[-1]["results"]["decode"]) == list(NAMES)
        assert len(kept[-1]["rounds"]["decode"]["tokenmill"]) == 2

    def test_an_interrupted_workload_shows_its_finished_rounds(self, console: Console) -> None:
        report = Report(console, lambda _: None, rounds=9)
        part = measurement(vllm=[4.0])
        report.begin(part)("vllm", part.turns["vllm"][0])
        report.close()
        assert "medians of 1 round\n" in text_of(console)

    def test_the_summary_has_a_ratio_for_each_engine(self, console: Console) -> None:
        show_summary(
            [measurement(tokenmill=[1.0, 1.0], vllm=[1.7, 1.7], floor=[0.5, 0.5])], console
        )
        text = text_of(console)
        figures = ["8.0", "4.00", "1.70", "4.00", "4.00", "0.50"]
        assert text.splitlines()[-1].split() == ["decode", *figures]
        assert max(map(len, text.splitlines())) <= 80

    def test_a_turn_is_printed_with_its_disturbance(self) -> None:
        both = measurement()
        calm, loud = (
            turn(4.0, disturbance=Disturbance(0.01, 0.0)),
            turn(4.0, disturbance=Disturbance(0.3, 0.02)),
        )
        assert turn_line(both, "vllm", calm, 3).endswith("others 1%, stolen 0%")
        assert turn_line(both, "vllm", loud, 3).endswith("others 30%, stolen 2%  DISTURBED")


class Machine:
    """A machine whose cores and processes used as much time as is said here, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cores = dict.fromkeys(("user", "nice", "system", "idle", "iowait", "steal"), 0.0)
        self.own = [(0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)]  # of a process and its child
        monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(**self.cores))
        monkeypatch.setattr(psutil, "Process", lambda _pid: self._process(0, [self._process(1)]))

    def _process(self, number: int, children: Sequence[object] = ()) -> Any:
        return SimpleNamespace(
            cpu_times=lambda: (*self.own[number], 9.0), children=lambda recursive: children
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


class TestCoreWatch:
    def test_own_time_is_the_tree_s_and_the_rest_is_others(self, machine: Machine) -> None:
        watch = CoreWatch(7)
        # Of 10 s: 5 idle, 1 waiting, 0.2 stolen, 3.8 busy; ours 2 and 0.8 of a child.
        machine.cores |= {"user": 3.0, "system": 0.8, "idle": 5.0, "iowait": 1.0, "steal": 0.2}
        machine.own = [(1.5, 0.5, 0.0, 0.0), (0.4, 0.2, 0.1, 0.1)]
        found = watch.read()
        assert found is not None
        assert (found.others, found.stolen) == pytest.approx((0.1, 0.02))

    def test_a_moment_gives_no_figures(self, machine: Machine) -> None:
        watch = CoreWatch(7)
        machine.cores["idle"] += 0.3
        assert watch.read() is None

    def test_a_real_process_is_found(self) -> None:
        busy = "import time\nend = time.monotonic() + 0.4\nwhile time.monotonic() < end: pass"
        watch = CoreWatch(os.getpid())
        subprocess.run([sys.executable, "-c", busy], check=True)
        found = watch.read()
        assert found is not None
        assert 0 <= found.others <= 1
        assert 0 <= found.stolen <= 1


class TestWaitUntilQuiet:
    @staticmethod
    def pauses(machine: Machine, busy_shares: list[float]) -> int:
        """Count the pauses of `wait_until_quiet` if the cores are this busy at its looks, then
        idle.
        """
        looks = 0

        def pause(seconds: float) -> None:
            nonlocal looks
            share = busy_shares[looks] if looks < len(busy_shares) else 0.0
            looks += 1
            machine.cores["user"] += share * seconds
            machine.cores["idle"] += (1 - share) * seconds

        wait_until_quiet(pause)
        return looks

    def test_it_waits_while_another_process_computes(self, machine: Machine) -> None:
        assert self.pauses(machine, []) == 1
        assert self.pauses(machine, [0.5, 0.1]) == 3

    def test_a_machine_that_is_never_quiet_is_measured_all_the_same(self, machine: Machine) -> None:
        assert self.pauses(machine, [1.0] * 100) == 20
