"""llama.cpp as a peer: the weights it gets are ours, its batches hold what continuous batching
wants; the real thing where it has been built.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.workload_files import Workload, WorkloadRequest
from ops.benchmarks.peers import gguf_weights
from ops.benchmarks.peers.child import Child, Kind
from ops.benchmarks.peers.environments import (
    LLAMA_CPP_OPTIONS,
    LLAMA_CPP_VERSION,
    BuildError,
    PeerEnvironment,
)
from ops.benchmarks.peers.llamacpp_engine import Running, fill


@pytest.fixture
def source(tmp_path: Path) -> Path:
    numpy = pytest.importorskip("numpy")
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_file_type(3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    weights = numpy.random.default_rng(1).normal(size=(8, 64)).astype(numpy.float32)
    packed = gguf.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", numpy.arange(64, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("kind", "file_type", "error"), [("f32", 0, 0.0), ("q8_0", 7, 0.02)])
def test_the_weights_are_the_same(
    source: Path, tmp_path: Path, kind: str, file_type: int, error: float
) -> None:
    numpy = pytest.importorskip("numpy")
    gguf = pytest.importorskip("gguf")
    told: list[str] = []
    path = gguf_weights.weights_for(str(source), kind, tmp_path / "cache", told.append)
    assert gguf_weights.weights_for(str(source), kind, tmp_path / "cache", told.append) == path
    assert len(told) == 1, "written once"
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [path.name], (
        "nothing is left beside it"
    )
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(path)
    assert after.fields["general.file_type"].contents() == file_type
    assert after.fields["llama.block_count"].contents() == 3
    assert after.fields["tokenizer.ggml.tokens"].contents() == ["a", "b", "ü"]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, list(old.shape)) == (new.name, list(new.shape))
        values = [gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in (old, new)]
        assert float(numpy.abs(values[0] - values[1]).max()) <= error
    assert after.tensors[1].tensor_type == gguf.GGMLQuantizationType.F32, "norms stay as they are"


def test_a_file_as_it_is_is_not_copied(source: Path, tmp_path: Path) -> None:
    assert (
        gguf_weights.weights_for(str(source), gguf_weights.AS_IT_IS, tmp_path, lambda _: None)
        == source
    )


def test_a_model_without_a_gguf_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reads GGUF files"):
        gguf_weights.weights_for(str(tmp_path), "f32", tmp_path, lambda _: None)


class TestEnvironment:
    def test_a_finished_one_is_used_as_it_is(self, tmp_path: Path) -> None:
        environment = PeerEnvironment("llamacpp", tmp_path / "llamacpp")
        environment.folder.mkdir()
        (environment.folder / ".finished").write_text(
            f"llama-cpp-python=={LLAMA_CPP_VERSION} {LLAMA_CPP_OPTIONS}"
        )
        assert (
            environment.ensure_llamacpp(lambda _: None) == tmp_path / "llamacpp" / "bin" / "python"
        )
        assert not environment.log.exists()

    def test_without_a_compiler_nothing_is_begun(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        environment = PeerEnvironment("llamacpp", tmp_path / "llamacpp")
        with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
            environment.ensure_llamacpp(lambda _: None)
        assert not environment.folder.exists()


class TestBatches:
    @staticmethod
    def batch(size: int) -> SimpleNamespace:
        rows = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(size)], **rows)

    def test_decodes_come_first_and_prompts_fill_what_is_left(self) -> None:
        decoding = Running(0, WorkloadRequest((1, 2), 9), slot=5, position=2, tokens=[7])
        short, long = (
            Running(n, WorkloadRequest(tuple(range(size)), 9), slot=n)
            for n, size in ((1, 3), (2, 6))
        )
        batch = self.batch(8)
        rows = fill(batch, [short, decoding, long], limit=8)
        assert batch.n_tokens == 8
        assert batch.token == [7, 0, 1, 2, 0, 1, 2, 3]
        assert batch.pos == [2, 0, 1, 2, 0, 1, 2, 3]
        assert [slot for (slot,) in batch.seq_id] == [5, 1, 1, 1, 2, 2, 2, 2]
        assert [(row, sequence.index) for row, sequence in rows] == [(0, 0), (3, 1)], (
            "a chunk's end gives no token"
        )
        assert [row for row, wants in enumerate(batch.logits) if wants] == [0, 3]
        short.tokens.append(9)
        decoding.tokens.append(8)
        rows = fill(batch, [short, decoding, long], limit=8)
        assert batch.token[: batch.n_tokens] == [9, 8, 4, 5]
        assert [sequence.index for _, sequence in rows] == [1, 0, 2]


@pytest.mark.model
@pytest.mark.slow
def test_the_real_one_answers_in_order(tmp_path: Path) -> None:
    """Run more requests than slots, of different lengths.

    Skipped unless `ops/bench engine --peer llamacpp` has built llama.cpp.
    """
    environment = PeerEnvironment("llamacpp")
    if not (environment.folder / ".finished").exists():
        pytest.skip("llama.cpp has not been built here")
    requests = tuple(WorkloadRequest(tuple(range(200 + n, 210 + 3 * n)), 2 + n) for n in range(4))
    path = gguf_weights.weights_for(
        "smollm2-135m-instruct", "f32", environment.folder.parent, lambda _: None
    )
    kind = Kind("llamacpp", "ops.benchmarks.peers.llamacpp_engine", environment.python)
    tokens = []
    for slots in (4, 2):
        options = EngineOptions(str(path), threads=1, max_sequences=slots, max_batch_tokens=16)
        child = Child(kind, options, tmp_path / "log")
        child.wait_ready(lambda _: None)
        measured = child.run(Workload("four", requests))
        child.close()
        tokens.append(measured.tokens)
        assert [len(answer) for answer in measured.tokens] == [2, 3, 4, 5]
        assert max(measured.batch_sizes) <= slots
    assert tokens[0] == tokens[1], "whatever shares the batch"
