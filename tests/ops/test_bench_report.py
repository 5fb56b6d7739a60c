"""A comparison's report: tables of 80 columns, figures of complete rounds, disturbed rounds."""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
from rich.console import Console

from ops.benchmarks.compare.report import kill_line, show_results, turn_line
from ops.benchmarks.compare.rounds import Measurement
from ops.benchmarks.measure.disturbance import CoreWatch, wait_until_quiet
from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.measure.workload_files import Workload, WorkloadRequest

WORKLOAD = Workload("decode", (WorkloadRequest((1, 2, 3), 4), WorkloadRequest((4,), 4)))
NAMES = ("tokenmill", "transformers", "vllm", "static", "floor")


def round_of(seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4)) -> Round:
    return Round(seconds, [list(tokens)] * 2, [0.25 * seconds] * 2, batch_sizes=[2])


def measurement(**seconds: list[float]) -> Measurement:
    found = Measurement(WORKLOAD, NAMES)
    for name in NAMES:
        for each in seconds.get(name, [4.0, 4.0]):
            found.add(name, round_of(each))
    return found


class TestResults:
    def test_ratios_are_computed_per_round_that_all_engines_finished(self) -> None:
        both = measurement(tokenmill=[2.0, 1.0, 0.5], vllm=[4.0, 4.0])
        found = both.results()
        assert found["vllm"]["ratios"] == [2.0, 4.0]
        assert found["vllm"]["ratio"] == 3.0
        assert len(both.rounds["tokenmill"]) == 3, "what was measured is kept"
        assert found["tokenmill"]["wall_s"] == 1.5

    def test_tokens_that_differ_in_any_round_count_as_different(self) -> None:
        both = Measurement(WORKLOAD, ("tokenmill", "vllm"))
        for tokens in ((1, 2, 3, 4), (1, 2, 9, 4)):
            both.add("tokenmill", round_of(4.0))
            both.add("vllm", round_of(4.0, tokens))
            assert both.results()["vllm"]["is_equal"] is (tokens[2] == 3)
        assert both.results()["vllm"]["same"] == "0/2"

    def test_a_floor_has_no_comparison_of_tokens(self) -> None:
        both = Measurement(WORKLOAD, ("tokenmill", "floor"))
        both.add("tokenmill", round_of(2.0))
        both.add("floor", round_of(1.0, (100, 100, 100, 100)))
        found = both.results()["floor"]
        assert found["ratios"] == [0.5]
        assert not {"same", "is_equal"} & set(found)

    def test_tokens_of_the_deaths_of_all_parts_are_summed(self) -> None:
        both = measurement()
        both.kills["static"] = {
            "worker": {"lost": 3, "repeated": 5, "pause_s": 2.5},
            "server": {"lost": 4, "repeated": 0, "pause_s": 1.0},
        }
        found = both.results()
        assert (found["static"]["lost"], found["static"]["repeated"]) == (7, 5)
        assert "lost" not in found["vllm"]
        said = kill_line(both, "static", "worker")
        assert said.endswith("worker: 3 tokens lost, 5 repeated, 2.5 s without a token")

    def test_before_the_first_round_ends_there_are_no_results(self) -> None:
        assert measurement(vllm=[]).results() == {}


class TestTables:
    @staticmethod
    def printed(measured: Measurement) -> str:
        file = io.StringIO()
        show_results(measured, Console(width=80, file=file))
        return file.getvalue()

    def test_six_engines_fit_in_80_columns(self) -> None:
        text = self.printed(measurement(tokenmill=[0.01, 0.02], transformers=[1234.5, 1000.0]))
        assert "…" not in text
        table = text[text.index("decode: ") : text.index("tokenmill: ")].splitlines()
        assert max(map(len, table)) <= 80
        rows = [line for line in table if line.startswith(NAMES)]
        assert [row[:13].strip() for row in rows] == list(NAMES), "a row each, none of them wrapped"

    def test_an_interrupted_workload_shows_its_finished_rounds(self) -> None:
        assert "medians of 1 round\n" in self.printed(measurement(vllm=[4.0]))
        assert self.printed(measurement(vllm=[])) == ""

    def test_a_turn_is_printed_with_the_share_of_other_processes(self) -> None:
        both = Measurement(WORKLOAD, NAMES)
        both.add("vllm", round_of(4.0), others_share=0.01)
        assert turn_line(both, "vllm", 3).endswith("others 1%")
        both.add("vllm", round_of(4.0), others_share=0.3)
        assert turn_line(both, "vllm", 3).startswith("decode 2/3  vllm")
        assert turn_line(both, "vllm", 3).endswith("others 30%  DISTURBED")


class Times(NamedTuple):
    """Seconds of all cores; those of guests are counted among the user's too."""

    user: float = 0.0
    nice: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    irq: float = 0.0
    softirq: float = 0.0
    steal: float = 0.0
    guest: float = 0.0


class Machine:
    """A machine whose cores and processes used as much time as is said here, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cores = Times()
        self.own = [(0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)]  # of a process and its child
        monkeypatch.setattr(psutil, "cpu_times", lambda: self.cores)
        monkeypatch.setattr(psutil, "Process", lambda _pid: self._process(0, [self._process(1)]))

    def _process(self, number: int, children: Sequence[object] = ()) -> Any:
        return SimpleNamespace(
            cpu_times=lambda: (*self.own[number], 9.0), children=lambda recursive: children
        )


class TestCoreWatch:
    def test_cpu_time_outside_the_process_tree_counts_as_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine = Machine(monkeypatch)
        watch = CoreWatch(7)
        assert watch.others_share() == 0.0, "no time has passed"
        # Of 10 s: 5 idle, 1 waiting, 0.2 of the host, 3.8 busy; ours 2 and 0.8 of a child.
        machine.cores = Times(user=3.0, system=0.8, idle=5.0, iowait=1.0, steal=0.2, guest=3.0)
        machine.own = [(1.5, 0.5, 0.0, 0.0), (0.4, 0.2, 0.1, 0.1)]
        assert watch.others_share() == pytest.approx(0.12)

    def test_the_others_share_of_a_real_process_is_a_fraction(self) -> None:
        busy = "import time\nend = time.monotonic() + 0.4\nwhile time.monotonic() < end: pass"
        watch = CoreWatch(os.getpid())
        subprocess.run([sys.executable, "-c", busy], check=True)
        assert 0 <= watch.others_share() <= 1


@pytest.mark.parametrize(("busy", "looks"), [([], 1), ([50.0, 10.0], 3), ([100.0] * 99, 20)])
def test_a_turn_waits_for_idle_cores_up_to_a_limit(
    busy: list[float], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def cpu_percent(interval: float) -> float:
        asked.append(interval)
        return busy[len(asked) - 1] if len(asked) <= len(busy) else 0.0

    monkeypatch.setattr(psutil, "cpu_percent", cpu_percent)
    wait_until_quiet()
    assert len(asked) == looks
