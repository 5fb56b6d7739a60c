"""A rank that fails in a step ends its group: no rank waits in a collective for ever."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill_worker.local.valkey_server import free_port

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("failing") / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


class Pair:
    """Two ranks as plain processes, without a launcher that would end one when the other fails."""

    def __init__(self, failing: int, folder: Path) -> None:
        self._failing = failing
        self._folder = folder

    def output(self, rank: int) -> str:
        return (self._folder / f"{self._failing}-{rank}.txt").read_text(errors="replace")

    def status(self, rank: int) -> int | None:
        ended = self._folder / f"{self._failing}-{rank}.status"
        return int(ended.read_text()) if ended.exists() else None

    def wait(self, rank: int, timeout_s: float = 200.0) -> int:
        deadline = time.monotonic() + timeout_s
        while (status := self.status(rank)) is None:
            assert time.monotonic() < deadline, (self._folder / "launcher.txt").read_text(
                errors="replace"
            )
            time.sleep(0.05)
        return status


@pytest.fixture(scope="module")
def pairs(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pair]]:
    """Start two pairs: rank 0 fails in one, rank 1 in the other."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("failing_ranks.py")
    variables = (f"PYTHONPATH={ROOT}", "PYTHONUNBUFFERED=1")
    command = ["env", *variables, sys.executable, str(script), str(model_path), str(folder)]
    command += [str(free_port()), str(free_port())]
    with (folder / "launcher.txt").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
    try:
        yield [Pair(failing, folder) for failing in (0, 1)]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("failing", [0, 1])
def test_the_other_rank_ends_if_one_rank_fails_in_a_step(failing: int, pairs: list[Pair]) -> None:
    pair, other = pairs[failing], 1 - failing
    assert pair.wait(other) != 0, pair.output(other)
    if failing == 1:
        assert pair.wait(1) != 0
    assert "this rank is broken" in pair.output(failing), pair.output(failing)
    if failing == 0:
        assert (
            "LOST the device is lost: rank 0 failed in a step: RuntimeError: this rank is broken"
            in pair.output(0)
        )
        assert pair.status(0) is None  # alive, so the other has not ended for want of a peer
