"""`ops/bench engine`, `service` and `bulk` from end to end on the model-free engine: real processes
and figures.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ops.benchmarks.__main__ import main
from ops.benchmarks.commands.engine import options_for
from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.workloads import SHAPES, WorkloadRequest


def add_letters() -> None:
    """Add a shape of letters alone, which the model-free engine knows."""
    SHAPES["letters"] = lambda *_: tuple(
        WorkloadRequest((65 + number, 66, 67, 68 + number), 50 + number) for number in range(6)
    )


@pytest.fixture(autouse=True)
def letters() -> Iterator[None]:
    add_letters()
    yield
    del SHAPES["letters"]


def measure(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    fixed = [
        "--model",
        "synthetic?step_ms=2",
        "--pool-tokens",
        "4096",
        "--rounds",
        "2",
        "--json",
        str(out),
    ]
    assert main([*arguments, *fixed]) == 0
    record: dict[str, Any] = json.loads(out.read_text())
    return record


@pytest.mark.slow
def test_bench_engine_records_rounds_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = measure(tmp_path, "engine", "--workload", "letters", "--set", "block_size=8")
    first, second = record["rounds"]["letters"]["tokenmill"]
    # 55 steps: all prompts in the first, which gives the first of 55 tokens
    assert first["places_used"] == second["places_used"] == pytest.approx(315 / 55 / 6)
    assert first["output_tok_s"] == pytest.approx(315 / first["wall_s"])
    printed = capsys.readouterr().out
    assert "letters 2/2  tokenmill" in printed, "each turn is printed as it ends"
    assert "medians of 2 rounds" in printed


def test_bench_variants_of_tokenmill_differ_in_one_setting() -> None:
    given = EngineOptions(model="a-model", settings={"quantization": "int8", "block_size": 32})
    names = ("tokenmill", "unquantised", "wide", "no-prefix-cache")
    chosen = {name: options_for(name, given).settings for name in names}
    offloads = EngineOptions(model="a-model", settings={"cpu_offload_gib": 1, "block_size": 32})
    assert options_for("no-offload", offloads).settings == {"block_size": 32}
    assert chosen == {
        "tokenmill": {"quantization": "int8", "block_size": 32},
        "unquantised": {"block_size": 32},
        "wide": {"block_size": 32, "narrow_weights": False},
        "no-prefix-cache": {"quantization": "int8", "block_size": 32, "prefix_cache": False},
    }


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """A shell's background jobs ignore Ctrl-C, and so would what they start: here a child begins
    with the default.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def until(start: str, lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines up to and including the first that begins with `start`."""
    for line in lines:
        yield line
        if line.startswith(start):
            return


@pytest.mark.slow
def test_an_interrupted_benchmark_keeps_and_shows_its_finished_rounds(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = [
        "--workload",
        "letters",
        "--model",
        "synthetic?step_ms=20",
        "--pool-tokens",
        "4096",
        "--rounds",
        "999",
    ]
    program = (
        "import sys; from tests.ops.test_bench_commands import add_letters, main; add_letters(); "
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "engine", *options, "--json", str(out)]
    with heeding_interrupts():
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    with process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        said = list(until("letters 2/999", lines))
        assert said[-1].startswith("letters 2/999"), "".join(said)
        process.send_signal(signal.SIGINT)
        rest = "".join(lines)
    assert process.returncode == 130
    assert "medians of" in rest
    record = json.loads(out.read_text())
    assert record["complete"] is False
    assert len(record["rounds"]["letters"]["tokenmill"]) >= 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], (
        "written at once, or not"
    )


@pytest.mark.slow
@pytest.mark.redis
def test_bench_service_records_rounds_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = measure(tmp_path, "service", "--workload", "letters")
    rounds = record["rounds"]["letters"]
    (whole, *_), (bare, *_) = rounds["whole way"], rounds["tokenmill"]
    assert record["results"]["letters"]["tokenmill"]["same"] == "6/6"
    assert 0 < whole["latency_p50_ms"] <= whole["latency_p99_ms"]
    assert min(whole[f"cpu_{part}_us"] for part in ("worker", "server", "subscribers")) > 0
    assert whole["wall_s"] > 0 < bare["wall_s"]
    assert whole["steady_tok_s"] > 0 < bare["steady_tok_s"]
    assert "tokenmill: ratio by round" in capsys.readouterr().out


@pytest.mark.redis
@pytest.mark.slow
def test_bench_bulk_records_both_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bulk.json"
    sizes = ["--lines", "3000", "--bulk-tokens", "8", "--jobs", "3", "--tokens", "4"]
    assert main(["bulk", *sizes, "--pause", "0", "--rest", "3", "--json", str(out)]) == 0
    cases = json.loads(out.read_text())["results"]["bulk"]
    assert {"jobs alone", "both"} <= set(cases)
    for name in ("jobs alone", "both"):
        assert cases[name]["jobs"] == 3
        assert 0 < cases[name]["first_ms_p50"] <= cases[name]["first_ms_p99"]
    # the count of tokens lags by a second, which is longer than three jobs take
    assert cases["both"]["tokens_s"] >= 0
    assert cases.get("the file alone", {"tokens_s": 1})["tokens_s"] > 0, "without: the file ended"
    assert "interactive jobs beside" in capsys.readouterr().out


@pytest.mark.redis
@pytest.mark.slow
def test_bench_bulk_records_both_orders_of_templates_and_the_jobs_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    out = tmp_path / "templates.json"
    sizes = ["--templates", "8", "--lines", "400"]
    assert main(["bulk", *sizes, "--beside", "--json", str(out)]) == 0
    shuffled, grouped = json.loads(out.read_text())["results"]["templates"].values()
    assert shuffled["completed"] == grouped["completed"] == 400
    assert shuffled["computed"] > grouped["computed"] >= 1
    for case in (shuffled, grouped):
        assert 0 < case["interactive_p50"] <= case["interactive_p99"]
        assert 0 < case["bulk_kept"] <= 1


@pytest.mark.redis
@pytest.mark.slow
def test_bench_affinity_records_hits(tmp_path: Path) -> None:
    out = tmp_path / "affinity.json"
    sizes = ["--chats", "6", "--turns", "3", "--pause", "0.2", "--rounds", "1"]
    assert main(["affinity", *sizes, "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    for figures in results["6 chats of 3 turns"].values():
        assert 0 < figures["hits"] < 1
        assert 0 < figures["first_ms"] <= figures["first_p99_ms"]


@pytest.mark.redis
def test_bench_backlog_compares_a_full_queue_with_an_empty_one(tmp_path: Path) -> None:
    out = tmp_path / "backlog.json"
    sizes = ["--jobs", "2000", "--sessions", "10", "--rounds", "2", "--claims", "8"]
    assert main(["backlog", *sizes, "--json", str(out)]) == 0
    (cases,) = json.loads(out.read_text())["results"].values()
    empty, full, _, sessions = cases.values()
    assert full["memory_mib"] > empty["memory_mib"] + 1, "the jobs wait"
    assert {"claim_ratio", "submit_ratio"} <= set(full) & set(sessions)
    assert all(figures["claim_us"] > 0 < figures["submit_us"] for figures in cases.values())
    assert full["calls"] == empty["calls"] == 1, "each claim has a job"
