"""`ops/gpu-check`: its stages run to their end on a CPU, none stops the next, and one table tells.

And what it carries to a machine without a network.
"""

import argparse
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from ops.benchmarks.commands import gpu
from ops.gpu_check import bench, cache, wheels
from ops.gpu_check.__main__ import LIMIT_S
from ops.gpu_check.forms import FORMS, stages_of
from ops.gpu_check.stages import MOST_BYTES, MOST_LINES, CheckStage, StageResult, run_stages, table

ROOT = Path(__file__).parents[2]

STAGES = {
    "first": ["machine", "kernels", "tests", "families", "bench"],
    "speed": ["machine", "bench"],
    "variants": ["machine", "prefixes", "bench"],
    "way": ["machine", "bench"],
}
IN_TABLE = ("draw top-k, top-p, 2 rows: ", "passed, 0 failed", "default: decode 3: tokens/s")
IN_LOG = (", floor's share ", "8-bit keys and values: decode 3: tokens/s")  # of the benchmark


def python(name: str, program: str, limit_s: float = 30.0) -> CheckStage:
    return CheckStage(name, [sys.executable, "-c", program], limit_s)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_every_stage_passes_on_a_cpu(tmp_path: Path) -> None:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}  # noqa: TID251 - a child's
    child = subprocess.run(
        [str(ROOT / "ops" / "gpu-check"), str(tmp_path), "--dry"],
        env={**kept, "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    lines = (tmp_path / "table.txt").read_text().splitlines()
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-2000:]
    stages = [found[1] for line in lines if (found := re.match(r"(\w+): ok \(", line))]
    assert stages == STAGES["first"]
    assert len(lines) <= MOST_LINES
    assert child.stdout.endswith("\n".join(lines) + "\n")
    text, log = "\n".join(lines), (tmp_path / "bench.log").read_text()
    assert all(words in text for words in IN_TABLE)
    assert all(words in log for words in IN_LOG)
    assert "WRONG" not in text
    names = [path.name for path in tmp_path.iterdir()]
    assert {f"{name}.log" for name in stages} | {"bench.json", "table.txt"} == set(names)
    assert len(names) < 8  # at most 8 come back: on a GPU the cache's file too


@pytest.mark.parametrize("form", FORMS)
def test_each_form_s_stages_fit_the_limit_and_its_benchmark_accepts_the_options(
    form: str, tmp_path: Path
) -> None:
    stages = stages_of(form, tmp_path, is_dry=False)
    assert [stage.name for stage in stages] == STAGES[form]
    assert sum(stage.limit_s for stage in stages) <= LIMIT_S
    command, limit_s = stages[-1].command, stages[-1].limit_s
    assert command[1:4] == ["-m", "ops.gpu_check.bench", str(tmp_path / "bench.json")]
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    options = parser.parse_args(command[4:])
    assert options.limit < limit_s
    assert options.part == ["way" if form == "way" else "model"]


def test_a_stage_that_fails_hangs_or_is_silent_does_not_stop_the_next(tmp_path: Path) -> None:
    hanging = "import subprocess, time; print('| begun'); "
    hanging += "subprocess.run(['sleep', '987654'])"
    stages = [
        python("failing", "print('| before'); raise SystemExit(3)"),
        python("hanging", hanging, 1.5),
        python("silent", ""),
        CheckStage("absent", ["/does/not/exist"], 5.0),
        python("last", "print('hidden'); print('| seen')"),
    ]
    outcomes = run_stages(stages, tmp_path, {}, 60.0)
    assert [outcome.said for outcome in outcomes[:3]] == ["failed (3)", "killed after 2 s", "ok"]
    assert outcomes[3].said.startswith("not started: ")
    assert outcomes[4].said == "ok"
    assert [list(outcome.lines) for outcome in outcomes] == [
        ["before"], ["begun"], [], [], ["seen"],
    ]  # fmt: skip
    assert (tmp_path / "last.log").read_text() == "hidden\n| seen\n"
    for _ in range(50):  # the children of a killed stage end with it
        if "sleep 987654" not in subprocess.getoutput("ps -eo args | grep -v grep"):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a child of the killed stage lives on")


def test_the_whole_call_ends_in_time(tmp_path: Path) -> None:
    stages = [python("long", "import time; time.sleep(60)", 60.0), python("next", "print(1)")]
    outcomes = run_stages(stages, tmp_path, {}, 6.0)
    assert [outcome.said for outcome in outcomes] == ["killed after 6 s", "no time was left"]


def test_a_log_above_the_size_limit_loses_its_middle(tmp_path: Path) -> None:
    program = "print('first'); print('x' * (20 << 20)); print('| last')"
    (outcome,) = run_stages([python("large", program)], tmp_path, {}, 30.0)
    log = (tmp_path / "large.log").read_text()
    assert len(log) < MOST_BYTES + 100
    assert log.startswith("first\n")
    assert log.endswith("| last\n")
    assert list(outcome.lines) == ["last"]


def test_a_long_table_is_cut_at_its_longest_outcome() -> None:
    outcomes = [
        StageResult("brief", "ok", 1.0, ["one", "two"]),
        StageResult("wordy", "ok", 2.0, [f"line {number}" for number in range(90)]),
    ]
    lines = table(outcomes, ["wheels: nothing is missing"])
    assert len(lines) == MOST_LINES
    assert lines[:4] == ["wheels: nothing is missing", "brief: ok (1.0 s)", "  one", "  two"]
    assert lines[4] == "wordy: ok (2.0 s, 55 more lines in its log)"


@pytest.mark.slow
def test_failures_are_printed_as_they_happen(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "def test_good(): pass\ndef test_bad(): assert 1 == 2, 'uneven'\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "ops.gpu_check.reports", "-p", "no:randomly"]
    child = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(tmp_path), "-n", "1", str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    marked = [line for line in child.stdout.splitlines() if line.startswith("| ")]
    assert marked == [
        "| call failed: test_one.py::test_bad: AssertionError: uneven",
        "| 1 passed, 1 failed, 0 error, 0 skipped",
    ]


def test_carried_wheels_are_unpacked_if_their_modules_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = {"msgspec": "msgspec", "absent_one": "absent-one", "absent_two": "absent-two"}
    monkeypatch.setattr(wheels, "LACKING", lacking)
    program = zipfile.ZipInfo("absent_one_server")
    program.external_attr = 0o100755 << 16
    with zipfile.ZipFile(tmp_path / "absent_one-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("absent_one.py", "x = 1\n")
        archive.writestr(program, "#!/bin/sh\n")
    said = wheels.install(tmp_path, tmp_path / "site")
    assert said == "unpacked absent_one; missing: absent_two (run ops/gpu-wheels first)"
    assert (tmp_path / "site" / "absent_one.py").read_text() == "x = 1\n"
    assert os.access(tmp_path / "site" / "absent_one_server", os.X_OK)


def test_every_wheel_has_a_pinned_version() -> None:
    assert len(wheels.pinned()) == len(wheels.LACKING)
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", word) for word in wheels.pinned())


def test_compiled_kernels_are_reused_by_the_next_call(tmp_path: Path) -> None:
    first, second, archive = tmp_path / "first", tmp_path / "second", tmp_path / "triton.tar"
    assert cache.save(first, archive) == "nothing was compiled"
    assert cache.restore(archive, second) == "nothing was carried"
    (first / "ABC").mkdir(parents=True)
    (first / "ABC" / "kernel.cubin").write_bytes(b"code")
    assert cache.save(first, archive).startswith("1 files, ")
    assert cache.restore(archive, second).startswith("restored ")
    assert (second / "ABC" / "kernel.cubin").read_bytes() == b"code"
    archive.write_bytes(b"broken")
    assert "unusable" in cache.restore(archive, second)


def test_a_benchmark_without_results_has_a_reason() -> None:
    assert bench.rows({"ok": False, "error": "no CUDA device"}) == ["no CUDA device"]
    half = {"results": {"tiny": {"default": {}}}, "left_out": {"tiny: x": "no time was left"}}
    assert bench.rows(half) == ["left out: tiny: x: no time was left"]
