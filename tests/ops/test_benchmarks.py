"""The benchmarks' own parts: workloads, figures, the protocol with measured engines, the
command line.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.benchmarks.__main__ import main
from ops.benchmarks.measure.figures import Arrivals, medians, percentile
from ops.benchmarks.measure.protocol import EngineOptions, Round
from ops.benchmarks.measure.rounds import of_round
from ops.benchmarks.measure.workloads import SHAPES, Workload, WorkloadRequest, generate
from ops.benchmarks.peers.child import Child, ChildError

SMALL = Workload("small", (WorkloadRequest((1, 2, 3), 4), WorkloadRequest((4,), 2)))


class TestWorkloads:
    @pytest.mark.parametrize(
        ("name", "requests", "prompt", "output"),
        [
            ("decode", 32, (16, 16), (128, 128)),
            ("mixed", 64, (16, 512), (8, 256)),
            ("prefix", 64, (544, 544), (32, 32)),
            ("prefill", 16, (1024, 1024), (1, 1)),
            ("single", 1, (64, 64), (128, 128)),
        ],
    )
    def test_each_workload_has_its_lengths(
        self, name: str, requests: int, prompt: tuple[int, int], output: tuple[int, int]
    ) -> None:
        workload = generate(name)
        assert len(workload.requests) == requests
        lengths = [len(request.prompt) for request in workload.requests]
        answers = [request.max_tokens for request in workload.requests]
        assert prompt[0] <= min(lengths) <= max(lengths) <= prompt[1]
        assert output[0] <= min(answers) <= max(answers) <= output[1]

    def test_the_mixed_workload_has_many_prompt_lengths(self) -> None:
        lengths = {len(request.prompt) for request in generate("mixed").requests}
        assert len(lengths) > 32

    def test_the_prefix_workload_shares_only_its_prefix(self) -> None:
        prompts = [request.prompt for request in generate("prefix").requests]
        assert len({prompt[:512] for prompt in prompts}) == 1
        assert len({prompt[512:] for prompt in prompts}) == 64

    def test_a_workload_is_generated_the_same_each_time(self) -> None:
        for name in SHAPES:
            assert generate(name) == generate(name)


class TestFigures:
    def test_a_percentile_is_interpolated(self) -> None:
        assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
        assert percentile([1.0, 2.0], 0.75) == 1.75
        assert math.isnan(percentile([], 0.5))

    def test_figures_of_a_round_are_computed_from_its_times_and_tokens(self) -> None:
        measured = Round(
            wall_s=2.0,
            tokens=[[1, 2, 3, 4], [5, 6]],
            first_s=[0.5, 1.5],
            batch_sizes=[1, 1, 2, 2],
        )
        figures = of_round(SMALL, measured)
        assert figures["output_tok_s"] == 3.0
        assert figures["prompt_tok_s"] == 2.0
        assert figures["ttft_p50_ms"] == pytest.approx(1000.0)
        assert figures["places_used"] == 0.75

    def test_medians_cover_figures_of_every_round_only(self) -> None:
        rounds = [{"x": 1.0, "of two rounds": 5.0}, {"x": 4.0}, {"x": 2.0, "of two rounds": 6.0}]
        assert medians(rounds) == {"x": 2.0}

    def test_the_steady_rate_counts_while_all_requests_stream(self) -> None:
        """The first request begins at 1.0, the second at 2.0; the first ends at 4.0."""
        arrivals = Arrivals()
        for now, count in ((1.0, 1), (2.0, 2), (3.0, 5), (4.0, 1), (5.0, 9)):
            arrivals.add(now, count)
        assert arrivals.steady_rate([1.0, 2.0], [4.0, 5.0]) == 3.0
        assert arrivals.steady_rate([1.0, 4.5], [4.0, 5.0]) is None

    def test_the_longest_pause_is_between_two_arrivals(self) -> None:
        arrivals = Arrivals()
        assert arrivals.longest_pause() == 0.0
        for now in (1.0, 1.5, 4.0, 5.0):
            arrivals.add(now, 2)
        assert (arrivals.longest_pause(), arrivals.num_tokens) == (2.5, 8)


class TestChildren:
    """A child that answers by the protocol without any engine: the benchmark's plumbing, in a real
    process.
    """

    MODULE = """
import sys
from ops.benchmarks.measure.protocol import MeasuredEngine, Round

class Parrot(MeasuredEngine):
    description = "repeats its options"
    parts = ["beak"]
    def __init__(self, options):
        if options.model == "none":
            raise OSError("there is no such model")
        print("noise on standard output")
    def run(self, requests):
        if requests[0].max_tokens == 99:
            raise RuntimeError("it broke")
        num = len(requests)
        return Round(1.0, [list(r.prompt) for r in requests], [0.1] * num)
    def survive(self, requests, part):
        return {"lost": len(requests), "repeated": len(part), "pause_s": 0.5}
    def close(self):
        print("closed in order")
"""

    @pytest.fixture
    def start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Child]:
        (tmp_path / "parrot.py").write_text(self.MODULE)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        log = tmp_path / "log"
        return lambda model: Child("parrot", "parrot:Parrot", EngineOptions(model), log)

    def test_a_measured_child_answers_and_ends(
        self, start: Callable[[str], Child], tmp_path: Path
    ) -> None:
        child = start("any")
        child.wait_ready()
        assert child.description == "repeats its options"
        assert child.run(SMALL).tokens == [[1, 2, 3], [4]]
        assert child.parts == ["beak"]
        assert child.kill("beak", SMALL) == {"lost": 2, "repeated": 4, "pause_s": 0.5}
        child.close()
        assert (tmp_path / "log").read_text().splitlines() == [
            "noise on standard output",
            "closed in order",
        ]
        assert child._process.returncode == 0

    def test_a_child_s_error_becomes_a_sentence(self, start: Callable[[str], Child]) -> None:
        child = start("none")
        with pytest.raises(ChildError, match="there is no such model"):
            child.wait_ready()
        child.close()
        child = start("any")
        child.wait_ready()
        with pytest.raises(ChildError, match="it broke"):
            child.run(Workload("bad", (WorkloadRequest((1,), 99),)))
        child.close()


class TestCommandLine:
    def test_bench_help_lists_its_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help"]) == 0
        said = capsys.readouterr().out
        assert "engine" in said
        assert max(map(len, said.splitlines())) <= 80

    def test_an_unknown_bench_command_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["nonsense"]) == 2
        assert "no command nonsense" in capsys.readouterr().err

    def test_an_environment_that_nothing_names_is_one_sentence_and_status_1(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("VLLM_PYTHON", raising=False)
        assert main(["service", "--engine", "vllm"]) == 1
        assert "VLLM_PYTHON names no Python" in capsys.readouterr().out
