"""Tests of the folder of one vLLM's temporary files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill_worker.engines.vllm.own_folder import own_folder

HOLDS = (
    "import sys, time\n"
    "from tokenmill_worker.engines.vllm.own_folder import own_folder\n"
    "with own_folder() as name:\n"
    "    print(name, flush=True)\n"
    "    time.sleep(600)\n"
)


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # noqa: TID251 - handed on
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", HOLDS]
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as living,
    ):
        assert killed.stdout is not None
        assert living.stdout is not None
        names = [Path(said.readline().strip()) for said in (killed.stdout, living.stdout)]
        (names[0] / "a socket").touch()
        killed.kill()
        killed.wait()
        try:
            with own_folder() as name:
                assert [one.exists() for one in (*names, Path(name))] == [False, True, True]
        finally:
            living.kill()
    assert not Path(name).exists()
