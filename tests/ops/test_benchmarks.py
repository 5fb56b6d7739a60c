"""The benchmarks' own parts: workload files, figures, the protocol with measured engines, the
command line.
"""

import json
import math
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.benchmarks.__main__ import main
from ops.benchmarks.measure.figures import (
    Arrivals,
    alternate,
    medians,
    of_round,
    percentile,
)
from ops.benchmarks.measure.protocol import EngineOptions, Round
from ops.benchmarks.measure.workload_files import SHAPES, Workload, WorkloadRequest, generate, load
from ops.benchmarks.peers import environments
from ops.benchmarks.peers.child import Child, ChildError
from ops.benchmarks.peers.environments import VLLM_PACKAGE, BuildError, vllm_python

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

    def test_a_workload_file_is_read(self, tmp_path: Path) -> None:
        rows = [{"prompt": [1, 2, 3], "max_tokens": 4}, {"prompt": [4], "max_tokens": 2}]
        (tmp_path / "small.json").write_text(json.dumps({"requests": rows}))
        assert load(tmp_path / "small.json") == SMALL

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "{}",
            '{"requests": []}',
            '{"requests": [{"prompt": [], "max_tokens": 1}]}',
            "{'a'}",
        ],
    )
    def test_an_invalid_workload_file_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"bad\.json"):
            load(path)


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

    def test_cases_are_measured_in_alternating_order(self) -> None:
        order: list[tuple[str, int]] = []

        def measure(case: str, number: int) -> dict[str, float]:
            order.append((case, number))
            return {"x": float(number)}

        assert alternate(["a", "b"], 2, measure) == {
            case: [{"x": 0.0}, {"x": 1.0}] for case in "ab"
        }
        assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]

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
from ops.benchmarks.measure.protocol import MeasuredEngine, Round, serve

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

serve(Parrot)
"""

    @pytest.fixture
    def start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Child]:
        (tmp_path / "parrot.py").write_text(self.MODULE)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        log = tmp_path / "log"
        return lambda model: Child("parrot", "parrot", EngineOptions(model), log)

    def test_a_measured_child_answers_and_ends(
        self, start: Callable[[str], Child], tmp_path: Path
    ) -> None:
        child = start("any")
        child.wait_ready(lambda _: None)
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
            child.wait_ready(lambda _: None)
        child.close()
        child = start("any")
        child.wait_ready(lambda _: None)
        with pytest.raises(ChildError, match="it broke"):
            child.run(Workload("bad", (WorkloadRequest((1,), 99),)))
        child.close()


class TestPeerEnvironments:
    @pytest.fixture
    def peers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(environments, "PEERS", tmp_path)
        monkeypatch.delenv("VLLM_PYTHON", raising=False)
        return tmp_path

    def test_a_finished_environment_is_used_without_building(self, peers: Path) -> None:
        (peers / "vllm").mkdir()
        (peers / "vllm" / ".finished").write_text(VLLM_PACKAGE)
        assert vllm_python(lambda _: None) == peers / "vllm" / "bin" / "python"
        assert not (peers / "vllm-build.log").exists()

    def test_an_environment_that_a_variable_names_is_used_without_building(
        self, peers: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_PYTHON", "/opt/vllm/bin/python")
        assert vllm_python(lambda _: None) == Path("/opt/vllm/bin/python")
        assert list(peers.iterdir()) == []

    def test_a_failed_pip_is_an_error_of_one_sentence(
        self, peers: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        python = peers / "python"
        python.write_text("#!/bin/sh\necho 'ERROR: no wheel for this machine'; exit 1")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(BuildError, match=r"ERROR: no wheel .*vllm-build\.log"):
            vllm_python(lambda _: None)
        assert not (peers / "vllm" / ".finished").exists()

    def test_vllm_s_requirements_are_read_without_unneeded_packages(self, tmp_path: Path) -> None:
        """The names come in every form that metadata may have."""
        python = tmp_path / "python"
        lines = ("torch==2.13.0; platform_machine == 'x86_64'", "TorchVision", "six",
                 "Outlines_Core>=0.2", "boto3; extra == 's3'")  # fmt: skip
        python.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        assert environments._requirements(python) == ["six", "Outlines_Core>=0.2"]


class TestCommandLine:
    def test_bench_help_lists_its_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help"]) == 0
        said = capsys.readouterr().out
        assert "engine" in said
        assert max(map(len, said.splitlines())) <= 80

    def test_an_unknown_bench_command_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["nonsense"]) == 2
        assert "no command nonsense" in capsys.readouterr().err

    def test_a_missing_workload_is_one_sentence_and_status_1(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["engine", "--workload", "/nowhere.json"]) == 1
        assert "nowhere.json" in capsys.readouterr().out
