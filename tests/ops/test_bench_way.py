"""`ops/bench gpu --part way` on the CPU: the whole service beside the engine with a tiny model."""

import json
from pathlib import Path

import pytest
import torch

from ops.benchmarks.__main__ import main
from ops.benchmarks.gpu.models import random_model
from ops.benchmarks.gpu.whole_way import saved, shares
from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.measure.rounds import Measurement
from ops.benchmarks.measure.step_floor import SHAPES
from ops.benchmarks.measure.workloads import Workload, WorkloadRequest
from tests.ops.test_bench_gpu import TINY
from tokenmill_worker.text.tokenizer import Tokenizer


def test_a_saved_model_has_a_tokenizer_of_all_its_tokens() -> None:
    model = random_model(SHAPES["tiny"], "cpu", torch.float32)
    with saved(model, SHAPES["tiny"]) as folder:
        tokenizer = Tokenizer.load(folder)
        assert (folder / "model.safetensors").stat().st_size > 4 * SHAPES["tiny"].num_weights
    assert not folder.exists()
    assert tokenizer.vocab_size == SHAPES["tiny"].vocab_size
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, (300, 511))) == " 2c ff"


def test_the_service_s_share_is_computed_while_all_streams_run() -> None:
    requests = (WorkloadRequest((5,), 2),)
    rounds = Measurement(Workload("streams", requests), ("whole way", "tokenmill"))
    rounds.add("whole way", Round(2.0, [[7, 7]], [0.1], steady_tok_s=97.0))
    rounds.add("tokenmill", Round(1.8, [[7, 7]], [0.1], steady_tok_s=100.0))
    found = shares(rounds.results())
    assert (found["share_of_engine"], found["of_all"]) == (0.97, pytest.approx(0.9))
    rounds.add("whole way", Round(2.0, [[7, 7]], [0.1]))
    rounds.add("tokenmill", Round(1.8, [[7, 7]], [0.1], steady_tok_s=100.0))
    assert "share_of_engine" not in shares(rounds.results())


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.model
def test_the_service_is_measured_beside_the_engine(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert main(["gpu", *TINY, "--part", "way", "--rounds", "1", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    found = record["results"]["tiny"]
    assert record["left_out"] == {}
    assert found["whole way"]["of_all"] > 0
    assert found["whole way"]["bare"]["same"] == "3/3"
    assert {path.name for path in tmp_path.iterdir()} == {
        "gpu.json", "whole-way.log", "tokenmill.log",
    }  # fmt: skip
