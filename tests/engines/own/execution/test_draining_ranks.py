"""SIGTERM reaches all ranks at once: the others follow until rank 0 has drained."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.own.execution.test_failing_ranks import model_path  # noqa: F401 - a fixture
from tokenmill_worker.local.valkey_server import free_port

pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[4]


def test_a_follower_rank_keeps_stepping_until_rank_0_has_drained(model_path: Path) -> None:  # noqa: F811
    port = str(free_port())
    ranks = []
    for rank in "01":
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "test", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [
            sys.executable,
            str(Path(__file__).with_name("draining_ranks.py")),
            str(model_path),
        ]
        environment = dict(os.environ) | variables  # noqa: TID251 - for children
        ranks.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        )
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "STEPPING\n"
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert said == ["TOKENS 50\n", "ENDED\n"]
    assert [process.returncode for process in ranks] == [0, 0]
