"""The floor: the right products, and the engine's own steps."""

from pathlib import Path

import pytest
import torch

from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.workload_files import WorkloadRequest
from ops.benchmarks.peers.floor import Floor, LinearStack, shapes_of
from tests.engines.own.truth import tiny_models

needs_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="this torch was built without MKL"
)
REQUESTS = (WorkloadRequest(tuple(range(3, 40)), 5), WorkloadRequest((4, 5), 3))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"))


def test_the_floor_s_shapes_are_those_of_one_pass(llama: Path) -> None:
    layer = {(64 + 2 * 32, 64), (64, 64), (2 * 96, 64), (64, 96)}
    shapes = shapes_of(llama)
    assert len(shapes) == 4 * 4 + 1
    assert set(shapes[:-1]) == layer
    assert shapes[-1] == (tiny_models.VOCAB, 64)


@needs_mkl
def test_the_head_may_have_another_number_of_rows() -> None:
    stack = LinearStack([(96, 64), (64, 96), (320, 64)], max_tokens=20)
    with torch.inference_mode():
        for num_tokens, num_rows in ((20, 20), (1, 1), (13, 0)):
            stack.run(num_tokens, num_rows)


@needs_mkl
def test_the_floor_runs_the_engine_s_own_steps(llama: Path) -> None:
    options = EngineOptions(model=str(llama), max_batch_tokens=16, max_sequences=4)
    floor = Floor(options)
    before = floor._engine.stats().computed_tokens
    measured = floor.run(REQUESTS)
    computed = floor._engine.stats().computed_tokens - before
    floor.close()
    assert [len(tokens) for tokens in measured.tokens] == [5, 3]
    assert computed == 37 + 4 + 2 + 2, "a last token is never computed"
