"""ops/demo with a model-free engine: the whole service in real processes, and nothing of it left
afterwards.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
MARK = "DEMO_TEST_MARK"


class Demo:
    """One run of the demonstration, and every process that descends from it, however deep."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        self._mark = uuid.uuid4().hex
        self._folder = tmp_path
        self._output = tmp_path / "output"
        environment = {
            **os.environ,  # noqa: TID251
            "PYTHONPATH": str(ROOT),
            MARK: self._mark,
            "TMPDIR": str(tmp_path),
        }
        command = [
            sys.executable,
            "-m",
            "ops.demonstration",
            "--model",
            "synthetic?step_ms=5",
            *arguments,
        ]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd="/",
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        """Return the demo's live processes, also those whose parent is gone.

        They are found by a mark in the environment or, since Valkey overwrites that with its title,
        by their working directory.
        """
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(MARK) == self._mark or process.cwd().startswith(
                    str(self._folder)
                )
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_for_nobody(self, timeout_s: float) -> list[psutil.Process]:
        deadline = time.monotonic() + timeout_s
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        for process in demo.family():
            process.kill()
        demo.process.wait()


def test_the_demonstration_shows_every_answer_results_and_usage(
    demos: list[Demo], tmp_path: Path
) -> None:
    demo = Demo(tmp_path, "--max-tokens", "12")
    demos.append(demo)
    assert demo.process.wait(150) == 0, demo.output
    for number in range(1, 7):
        assert f"job {number} = succeeded" in demo.output
    usage = demo.output.split("usage, read from SQL")[1]
    assert all(tenant in usage for tenant in ("web", "mobile", "reports")), usage
    assert "nothing is left running" in demo.output
    assert demo.wait_for_nobody(0) == []
    assert list(tmp_path.glob("tokenmill-*")) == [], "its files are gone too"


@pytest.mark.parametrize("moment", ["starting Valkey", "the worker loads its model", "job 6 ?"])
def test_ctrl_c_at_any_moment_leaves_no_process_of_the_demonstration(
    demos: list[Demo], tmp_path: Path, moment: str
) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.wait_for(moment)
    os.killpg(demo.process.pid, signal.SIGINT)  # as a terminal does: to its whole process group
    assert demo.process.wait(60) == 130, demo.output
    assert "Traceback" not in demo.output
    assert demo.wait_for_nobody(2) == [], demo.output
    assert list(tmp_path.glob("tokenmill-*")) == []


def test_a_killed_demonstration_leaves_no_process(demos: list[Demo], tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.wait_for("job 6 ?")
    assert len(demo.family()) >= 4  # itself, Valkey, the worker, the engine
    demo.process.kill()
    assert demo.wait_for_nobody(10) == []
