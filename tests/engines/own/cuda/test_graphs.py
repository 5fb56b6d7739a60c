"""The cache of graphs, on a CPU.

A fake graph calls the function on the static buffers: wrong padding or a stale buffer shows.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engines.own.cuda.steps import config, fake_capture, step
from tests.engines.own.support import ChunkingPlanner, execute, make_sequence
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.cuda.graph_inputs import LARGEST_MIXED
from tokenmill_worker.engines.own.cuda.graphs import (
    SIGHTINGS,
    CapturedGraph,
    CaptureError,
    GraphRunner,
)
from tokenmill_worker.engines.own.device import StepInputs
from tokenmill_worker.engines.own.execution.build import load_model_runner
from tokenmill_worker.engines.own.execution.runner import ModelRunner
from tokenmill_worker.engines.own.sequence import Sequence

ROOT = Path(__file__).parents[4]


def failing_capture(run: Callable[[], Tensor]) -> CapturedGraph:
    raise CaptureError("operation not permitted when stream is capturing")


# ── the cache of graphs ──


class Recorder:
    """A forward pass that answers with the sum of ids and positions at the rows; counts its
    calls.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, inputs: StepInputs) -> Tensor:
        self.calls.append(inputs.input_ids.shape[0])
        return (inputs.input_ids + inputs.positions)[inputs.rows][:, None].float()


def expected(inputs: StepInputs) -> Tensor:
    return (inputs.input_ids + inputs.positions)[inputs.rows][:, None].float()


def test_a_decode_is_captured_at_once_and_replayed_after() -> None:
    forward = Recorder()
    graphs = GraphRunner(forward, config(), 512, fake_capture)
    for count, first_token in ((3, 7), (4, 20), (3, 90)):
        inputs = step([(1, 30)] * count, first_token=first_token)
        assert torch.equal(graphs.run(inputs), expected(inputs))
    assert (graphs.num_captured, graphs.num_replays) == (1, 3)
    assert set(forward.calls) == {4}


def test_a_mixed_shape_is_captured_after_several_uses() -> None:
    forward = Recorder()
    graphs = GraphRunner(forward, config(), 512, fake_capture)
    for count in (18, 20, 31, 25, 30):
        inputs = step([(count, 40), (1, 9)])
        assert torch.equal(graphs.run(inputs), expected(inputs))
    # eager and not padded; then captured, replayed twice
    assert forward.calls == [19, 21, 32, 32, 32, 32]
    assert (graphs.num_captured, graphs.num_replays) == (1, 2)


def test_the_least_recently_used_graph_is_evicted() -> None:
    graphs = GraphRunner(Recorder(), config(max_cached_graphs=2), 512, fake_capture)
    for count in (1, 2, 1, 8, 1, 2):
        graphs.run(step([(1, 30)] * count))
    assert [shape.num_seqs for shape in graphs.shapes] == [1, 2]
    assert graphs.num_captured == 4  # 1, 2, 8 (forgets 2), and 2 again (forgets 8)


def test_mixed_steps_evict_no_graph() -> None:
    """A capture takes long: with the places of mixed steps full, others run eagerly."""
    graphs = GraphRunner(Recorder(), config(max_cached_graphs=8), 512, fake_capture)
    for count in (1, 2, 4, 8):
        graphs.run(step([(1, 30)] * count))
    for count in (18, 40, 60, 80, 100):
        for _ in range(SIGHTINGS):
            graphs.run(step([(count, 120), (1, 9)]))
    assert [(shape.is_decode, shape.num_tokens) for shape in graphs.shapes] == [
        (True, 1), (True, 2), (True, 4), (True, 8), (False, 32), (False, 48),
    ]  # fmt: skip
    assert graphs.num_captured == 6


def test_graphs_share_the_memory_of_their_logits() -> None:
    outputs: list[Tensor] = []

    def capture(run: Callable[[], Tensor]) -> CapturedGraph:
        outputs.append(run())
        return CapturedGraph(lambda: None, outputs[-1])

    graphs = GraphRunner(Recorder(), config(), 512, capture)
    for count in (8, 2, 1):
        inputs = step([(1, 30)] * count)
        assert torch.equal(graphs.run(inputs), expected(inputs))
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 1


def test_a_graph_of_a_step_with_drafts_has_a_row_for_each_draft() -> None:
    """A sequence samples a row for each draft, so there may be more rows than sequences."""
    settings = config(max_num_seqs=3)
    graphs = GraphRunner(Recorder(), settings, 512, fake_capture)
    inputs = step([(5, 40)] * 3)
    rows = torch.arange(15)
    drafted = dataclasses.replace(inputs, rows=rows)
    for _ in range(SIGHTINGS + 1):
        assert torch.equal(graphs.run(drafted), expected(drafted))
    assert graphs.num_captured == 1


def test_a_large_mixed_step_always_stays_eager() -> None:
    forward = Recorder()
    graphs = GraphRunner(forward, config(), 4096, fake_capture)
    for _ in range(SIGHTINGS + 1):
        inputs = step([(LARGEST_MIXED + 1, 2000), (1, 9)])
        assert torch.equal(graphs.run(inputs), expected(inputs))
    assert (graphs.num_captured, graphs.num_replays) == (0, 0)


def test_a_failing_capture_leads_to_eager_steps_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    forward = Recorder()
    graphs = GraphRunner(forward, config(), 512, failing_capture)
    for count in (3, 3, 8):
        inputs = step([(1, 30)] * count)
        assert torch.equal(graphs.run(inputs), expected(inputs))
    assert forward.calls == [3, 3, 8]
    assert graphs.num_captured == 0
    assert "not permitted when stream is capturing" in str(graphs.refusal)
    assert len(caplog.records) == 1


def test_a_step_that_fails_by_itself_does_not_count_as_a_failed_capture() -> None:
    """The other shapes are captured after it, and so is its own once it runs."""
    forward = Recorder()

    def fails_once(inputs: StepInputs) -> Tensor:
        if not forward.calls:
            forward.calls.append(0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(inputs)

    graphs = GraphRunner(fails_once, config(), 512, fake_capture)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(step([(1, 30)] * 3))
    assert graphs.refusal is None
    for count in (8, 3):
        inputs = step([(1, 30)] * count)
        assert torch.equal(graphs.run(inputs), expected(inputs))
    assert [shape.num_seqs for shape in graphs.shapes] == [8, 4]


def test_a_step_that_samples_nothing_gives_no_rows() -> None:
    graphs = GraphRunner(Recorder(), config(), 512, fake_capture)
    for _ in range(SIGHTINGS):
        assert graphs.run(step([(20, 40), (5, 5)], num_rows=0)).shape == (0, 1)
    assert graphs.num_captured == 1


# ── with a model ──


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_padded_steps_give_the_same_tokens(
    family: str, attention: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    settings: dict[str, object] = {
        "model": str(folder), "dtype": "float32", "device": "cpu", "attention": attention,
        "block_size": 4,
        "num_blocks": 300, "max_num_seqs": 8, "q_padding_interval": 16, "kv_padding_interval": 32,
    }  # fmt: skip
    plain = load_model_runner(EngineConfig(**{**settings, "attention": "reference"}))  # type: ignore[arg-type]
    graphed = load_model_runner(EngineConfig(**settings))  # type: ignore[arg-type]
    # whatever a padded step reads beyond its own blocks would show
    for layer in graphed._layers.values():
        layer.cache.fill_(torch.nan)
    graphs = GraphRunner(
        graphed.forward, graphed.info.config, graphed.info.max_model_len, fake_capture
    )
    graphed.graphs = graphs
    assert answers(graphed) == answers(plain)
    assert graphs.num_captured >= 4
    assert graphs.num_replays > 3 * graphs.num_captured


def answers(runner: ModelRunner) -> list[list[int]]:
    """Prompts of many lengths in chunks of 7, answers of many lengths: batches grow and shrink."""
    draw = random.Random(5)
    lengths = [(draw.randint(1, 40), draw.randint(3, 40)) for _ in range(7)]
    sequences: list[Sequence] = []
    planner = ChunkingPlanner(runner.info.cache_config, 7)
    for i, (prompt_len, max_tokens) in enumerate(lengths):
        sequences.append(
            make_sequence(f"s{i}", [draw.randint(3, 300) for _ in range(prompt_len)], max_tokens)
        )
        planner.add(sequences[-1])
    while not (plan := planner.plan()).is_empty:
        planner.commit(plan, execute(runner, plan))
    return [sequence.output_ids for sequence in sequences]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_captured_graphs_give_the_eager_tokens_on_cuda(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = folder_of(family)
    settings: dict[str, object] = {
        "model": str(folder), "dtype": "float32", "device": "cuda", "attention": "triton",
        "block_size": 4,
        "num_blocks": 300, "max_num_seqs": 8, "q_padding_interval": 16, "kv_padding_interval": 32,
    }  # fmt: skip
    eager = load_model_runner(EngineConfig(**settings, cuda_graphs=False))  # type: ignore[arg-type]
    graphed = load_model_runner(EngineConfig(**settings, cuda_graphs=True))  # type: ignore[arg-type]
    assert eager.graphs is None
    assert graphed.graphs is not None
    assert answers(graphed) == answers(eager)
    assert isinstance(graphed.graphs, GraphRunner)
    assert graphed.graphs.refusal is None
    assert graphed.graphs.num_replays > 3 * graphed.graphs.num_captured


CAPTURES = """
import torch
from tokenmill_worker.engines.own.cuda.graphs import CaptureError, CudaCapture

numbers, stream = torch.ones(3, device="cuda"), torch.cuda.current_stream()
capture = CudaCapture(numbers.device)
try:
    capture(lambda: numbers * numbers.sum().item())  # reads a value back
except CaptureError as refusal:
    print(refusal)
assert torch.cuda.current_stream() == stream
assert (numbers + 1).tolist() == [2.0, 2.0, 2.0]
(graph := capture(lambda: numbers * 2)).replay()
assert graph.output.tolist() == [2.0, 2.0, 2.0]
"""


@pytest.mark.gpu
def test_a_refused_capture_leaves_the_device_usable() -> None:
    """A child process captures: after a broken capture, torch before 2.12 cannot capture again."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    child = subprocess.run(
        [sys.executable, "-c", CAPTURES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert "synchroniz" in child.stdout
