"""A rank that fails in the middle of a step ends its group: nobody waits in a collective that will never be."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.embedded import free_port

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("failing") / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


class Pair:
    """Two ranks as plain processes, with nobody above them who would end one for the other's sake."""

    def __init__(self, path: Path, guilty: int, folder: Path) -> None:
        script = Path(__file__).with_name("failing_ranks.py")
        self.outputs = [folder / f"rank-{rank}.txt" for rank in (0, 1)]
        port = free_port()
        self.processes = []
        for rank, output in enumerate(self.outputs):
            variables = [f"RANK={rank}", f"LOCAL_RANK={rank}", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1"]
            variables += [f"MASTER_PORT={port}", f"PYTHONPATH={ROOT}", "PYTHONUNBUFFERED=1"]
            command = ["env", *variables, sys.executable, str(script), str(path), str(guilty)]
            with output.open("wb") as file:
                self.processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT))

    def said(self, rank: int) -> str:
        return self.outputs[rank].read_text(errors="replace")

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def pairs(model_path: Path, tmp_path: Path) -> Iterator[list[Pair]]:
    started: list[Pair] = []
    yield started
    for pair in started:
        pair.end()


@pytest.mark.parametrize("guilty", [0, 1])
def test_the_other_rank_does_not_wait_for_ever(
    guilty: int, model_path: Path, tmp_path: Path, pairs: list[Pair]
) -> None:
    pair = Pair(model_path, guilty, tmp_path)
    pairs.append(pair)
    innocent = 1 - guilty
    assert pair.processes[innocent].wait(timeout=120) != 0, pair.said(innocent)
    assert "this rank is broken" in pair.said(guilty), pair.said(guilty)
    if guilty == 0:
        assert "LOST the device is lost: rank 0 failed in a step: RuntimeError: this rank is broken" in pair.said(0)
        assert pair.processes[0].poll() is None  # alive, so the other has not ended for want of a peer
    else:
        assert pair.processes[1].wait(timeout=60) != 0
