"""A comparison's report: tables of 80 columns, figures of complete rounds, disturbed rounds."""

import io

import psutil
import pytest
from rich.console import Console

from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.measure.quiet import wait_until_quiet
from ops.benchmarks.measure.rounds import Measurement
from ops.benchmarks.measure.workloads import Workload, WorkloadRequest

WORKLOAD = Workload("decode", (WorkloadRequest((1, 2, 3), 4), WorkloadRequest((4,), 4)))
NAMES = ("tokenmill", "transformers", "vllm", "static", "wide")


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

    def test_tokens_of_the_deaths_of_all_parts_are_summed(self) -> None:
        both = measurement()
        both.kills["static"] = {
            "worker": {"lost": 3, "repeated": 5, "pause_s": 2.5},
            "server": {"lost": 4, "repeated": 0, "pause_s": 1.0},
        }
        found = both.results()
        assert (found["static"]["lost"], found["static"]["repeated"]) == (7, 5)
        assert "lost" not in found["vllm"]
        said = both.kill_line("static", "worker")
        assert said.endswith("worker: 3 tokens lost, 5 repeated, 2.5 s without a token")

    def test_before_the_first_round_ends_there_are_no_results(self) -> None:
        assert measurement(vllm=[]).results() == {}


class TestTables:
    @staticmethod
    def printed(measured: Measurement) -> str:
        file = io.StringIO()
        measured.show(Console(width=80, file=file))
        return file.getvalue()

    def test_five_engines_fit_in_80_columns(self) -> None:
        text = self.printed(measurement(tokenmill=[0.01, 0.02], transformers=[1234.5, 1000.0]))
        assert "…" not in text
        table = text[text.index("decode: ") : text.index("tokenmill: ")].splitlines()
        assert max(map(len, table)) <= 80
        rows = [line for line in table if line.startswith(NAMES)]
        assert [row[:13].strip() for row in rows] == list(NAMES), "a row each, none of them wrapped"

    def test_an_interrupted_workload_shows_its_finished_rounds(self) -> None:
        assert "medians of 1 round\n" in self.printed(measurement(vllm=[4.0]))
        assert self.printed(measurement(vllm=[])) == ""

    def test_a_turn_is_printed_as_a_line(self) -> None:
        both = Measurement(WORKLOAD, NAMES)
        both.add("vllm", round_of(4.0))
        both.add("vllm", round_of(4.0))
        words = "decode 2/3 vllm 2.0 tok/s 4.0 s"
        assert both.turn_line("vllm", 3).split() == words.split()


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
