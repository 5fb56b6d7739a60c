"""Padded shapes, static inputs and the cache of graphs, on a CPU.

A fake graph calls the function on the static buffers: wrong padding or a stale buffer shows.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.support import ChunkingPlanner, execute, make_sequence
from tokenmill_worker.engine.attention import AttentionMetadata
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.cuda.graph_inputs import StaticInputs, padded_batch, padded_shape
from tokenmill_worker.engine.cuda.graphs import (
    LARGEST_MIXED,
    SIGHTINGS,
    CapturedGraph,
    CaptureError,
    GraphRunner,
)
from tokenmill_worker.engine.device import StepInputs
from tokenmill_worker.engine.execution.build import load_model_runner
from tokenmill_worker.engine.execution.runner import ModelRunner
from tokenmill_worker.engine.sequence import Sequence

ROOT = Path(__file__).parents[3]


def fake_capture(run: Callable[[], Tensor]) -> CapturedGraph:
    output = run().clone()

    def replay() -> None:
        output.copy_(run())

    return CapturedGraph(replay, output)


def failing_capture(run: Callable[[], Tensor]) -> CapturedGraph:
    raise CaptureError("operation not permitted when stream is capturing")


def config(**changes: object) -> EngineConfig:
    settings: dict[str, object] = {"q_padding_interval": 16, "kv_padding_interval": 64}
    return EngineConfig(**{"model": "none", **settings, **changes})  # type: ignore[arg-type]


def step(
    lens: list[tuple[int, int]], num_rows: int | None = None, first_token: int = 7
) -> StepInputs:
    """`lens`: (query tokens, tokens in the cache). Ids, slots and tables are telling numbers."""
    num_tokens = sum(query_len for query_len, _ in lens)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, *(query_len for query_len, _ in lens)]).cumsum(0).int(),
        seq_lens=torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32),
        block_table=torch.arange(1, 1 + 5 * len(lens), dtype=torch.int32).view(len(lens), 5),
        slot_mapping=torch.arange(100, 100 + num_tokens),
        max_query_len=max(query_len for query_len, _ in lens),
        max_seq_len=max(seq_len for _, seq_len in lens),
        block_size=16,
        window=None,
        query_lens_host=tuple(query_len for query_len, _ in lens),
        seq_lens_host=tuple(seq_len for _, seq_len in lens),
    )
    rows = metadata.query_start[1:].long() - 1
    ids = torch.arange(first_token, first_token + num_tokens)
    return StepInputs(ids, ids + 1000, rows if num_rows is None else rows[:num_rows], (metadata,))


# ── shapes ──


def test_batches_are_padded_little_where_they_are_small() -> None:
    sizes = [padded_batch(n) for n in range(1, 1025)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * n for n, size in enumerate(sizes, 1) if n >= 32)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 40


def test_a_decode_and_a_mixed_step_have_shapes_of_their_own() -> None:
    decode = padded_shape(step([(1, 30)] * 5), config(), 512)
    assert (decode.is_decode, decode.num_tokens, decode.num_seqs, decode.num_rows) == (
        True,
        8,
        8,
        8,
    )
    assert (decode.max_query_len, decode.max_seq_len) == (1, 64)
    mixed = padded_shape(step([(1, 65), (20, 20), (1, 2)], num_rows=2), config(), 512)
    assert (mixed.is_decode, mixed.num_tokens, mixed.num_seqs, mixed.num_rows) == (False, 32, 4, 2)
    assert (mixed.max_query_len, mixed.max_seq_len) == (32, 128)


def test_lengths_are_not_padded_beyond_the_models() -> None:
    assert padded_shape(step([(1, 70)]), config(), 100).max_seq_len == 100
    assert padded_shape(step([(1, 70)]), config(kv_padding_interval=16_384), 100).max_seq_len == 100


# ── static inputs ──


@pytest.mark.parametrize(
    "lens", [[(1, 30)] * 3, [(1, 30), (20, 64), (3, 3)]], ids=["decode", "mixed"]
)
def test_what_a_larger_step_left_is_padding_again(lens: list[tuple[int, int]]) -> None:
    """A step loaded after a larger one leaves the same buffers as if it were the first."""
    larger = [(1, 60)] * 4 if lens[0] == lens[-1] else [(1, 60), (26, 64), (3, 3), (1, 2)]
    shape = padded_shape(step(lens), config(), 512)
    assert padded_shape(step(larger), config(), 512) == shape
    used, fresh = StaticInputs(shape, step(larger)), StaticInputs(shape, step(lens))
    used.load(step(larger, first_token=50))
    used.load(step(lens))
    fresh.load(step(lens))
    ours, theirs = used.current(), fresh.current()
    assert torch.equal(ours.input_ids, theirs.input_ids)
    assert torch.equal(ours.positions, theirs.positions)
    for name in ("query_start", "seq_lens", "slot_mapping", "block_table"):
        assert torch.equal(getattr(ours.metadata[0], name), getattr(theirs.metadata[0], name)), name
    assert torch.equal(ours.rows[: len(lens)], step(lens).rows)


def test_padding_of_a_decode_is_one_token_in_the_null_block() -> None:
    static = StaticInputs(padded_shape(step([(1, 30)] * 3), config(), 512), step([(1, 30)] * 3))
    static.load(step([(1, 30)] * 3))
    metadata = static.current().metadata[0]
    assert metadata.query_start.tolist() == [0, 1, 2, 3, 4]
    assert metadata.seq_lens.tolist() == [30, 30, 30, 1]
    assert metadata.slot_mapping.tolist() == [100, 101, 102, 0]
    assert not metadata.block_table[3].any()


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


def test_a_mixed_shape_is_captured_when_it_has_come_often() -> None:
    forward = Recorder()
    graphs = GraphRunner(forward, config(), 512, fake_capture)
    for count in (18, 20, 31, 25, 30):
        inputs = step([(count, 40), (1, 9)])
        assert torch.equal(graphs.run(inputs), expected(inputs))
    assert forward.calls == [
        19,
        21,
        32,
        32,
        32,
        32,
    ]  # eager and not padded; then captured, replayed twice
    assert (graphs.num_captured, graphs.num_replays) == (1, 2)


def test_the_graph_not_used_for_longest_is_forgotten() -> None:
    graphs = GraphRunner(Recorder(), config(max_cached_graphs=2), 512, fake_capture)
    for count in (1, 2, 1, 8, 1, 2):
        graphs.run(step([(1, 30)] * count))
    assert [shape.num_seqs for shape in graphs.shapes] == [1, 2]
    assert graphs.num_captured == 4  # 1, 2, 8 (forgets 2), and 2 again (forgets 8)


def test_mixed_steps_do_not_drive_out_decodes() -> None:
    graphs = GraphRunner(Recorder(), config(max_cached_graphs=8), 512, fake_capture)
    for count in (1, 2, 4, 8):
        graphs.run(step([(1, 30)] * count))
    for count in (18, 40, 60, 80, 100):
        for _ in range(SIGHTINGS):
            graphs.run(step([(count, 120), (1, 9)]))
    assert [(shape.is_decode, shape.num_tokens) for shape in graphs.shapes] == [
        (True, 1), (True, 2), (True, 4), (True, 8), (False, 96), (False, 112),
    ]  # fmt: skip


def test_a_large_mixed_step_stays_eager_however_often_it_comes() -> None:
    forward = Recorder()
    graphs = GraphRunner(forward, config(), 4096, fake_capture)
    for _ in range(SIGHTINGS + 1):
        inputs = step([(LARGEST_MIXED + 1, 2000), (1, 9)])
        assert torch.equal(graphs.run(inputs), expected(inputs))
    assert (graphs.num_captured, graphs.num_replays) == (0, 0)


def test_a_failing_capture_means_eager_steps_and_one_warning(
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


def test_a_step_that_fails_by_itself_is_no_capture_that_fails() -> None:
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
    for pool in graphed._pool.tensors:
        pool.fill_(torch.nan)  # whatever a padded step reads beyond its own blocks would show
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
from tokenmill_worker.engine.cuda.graphs import CaptureError, CudaCapture

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
def test_a_capture_that_is_refused_leaves_everything_as_it_was() -> None:
    """A child process captures: after a broken capture, torch before 2.12 cannot capture again."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    child = subprocess.run(
        [sys.executable, "-c", CAPTURES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert "synchroniz" in child.stdout
