"""Finding models: folders, GGUF files, built-in names; parallel requests share one conversion."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
import transformers

from tests.engines.own.truth import tiny_models
from tokenmill_worker.engines.own.model import gguf as convert
from tokenmill_worker.engines.own.model import model_files
from tokenmill_worker.engines.own.model.model_files import (
    BuiltIn,
    ModelNotFoundError,
    ModelUnusableError,
    resolve,
)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small Llama in GGUF by the format's own library, with a byte-level vocabulary."""
    path = tmp_path_factory.mktemp("gguf") / "Tiny.gguf"
    write_llama(path)
    return path


def write_llama(path: Path) -> None:
    import gguf

    size, heads, inner, layers = 32, 2, 64, 2
    tokens = ["<unk>", "<s>", "</s>", "t", "1", "t1", "x", *(f"x{i}" for i in range(57))]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["t 1", "x 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float32))

    tensor("token_embd.weight", len(tokens), size)
    tensor("output_norm.weight", size)
    tensor("output.weight", len(tokens), size)
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{layer}.{name}.weight", size, size)
        for name, shape in (
            ("ffn_gate", (inner, size)),
            ("ffn_up", (inner, size)),
            ("ffn_down", (size, inner)),
        ):
            tensor(f"blk.{layer}.{name}.weight", *shape)
        for name in ("attn_norm", "ffn_norm"):
            tensor(f"blk.{layer}.{name}.weight", size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_model_folder_is_used_without_conversion(tmp_path: Path) -> None:
    folder = tiny_models.save("gpt2", tmp_path)
    assert resolve(str(folder), tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds neither a config\.json nor a \.gguf file"):
        resolve(str(tmp_path))


def test_a_gguf_file_is_converted_once(gguf_file: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    folder = resolve(str(gguf_file), tmp_path, lambda what, fraction: seen.append((what, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert fractions[0] == 0.0
    assert fractions[-1] == 1.0
    assert fractions.count(1.0) == 1  # its end is logged once
    assert fractions == sorted(fractions)
    assert re.fullmatch(r"tiny-[0-9a-f]{12}", folder.name)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert {path.name for path in folder.parent.iterdir()} <= {folder.name, folder.name + ".lock"}
    seen.clear()
    assert (
        resolve(str(gguf_file), tmp_path, lambda what, fraction: seen.append((what, fraction)))
        == folder
    )
    assert seen == []
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 2
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == "</s>"


def test_a_folder_may_hold_one_gguf_file(gguf_file: Path, tmp_path: Path) -> None:
    assert resolve(str(gguf_file.parent), tmp_path) == resolve(str(gguf_file), tmp_path)
    several = tmp_path / "several"
    several.mkdir()
    with pytest.raises(
        ModelNotFoundError, match=r"several holds neither a config\.json nor a \.gguf file"
    ):
        resolve(str(several), tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (several / name).write_bytes(gguf_file.read_bytes())
    with pytest.raises(
        ModelNotFoundError, match=r"holds 2 \.gguf files \(a\.gguf, b\.gguf\): name one of them"
    ):
        resolve(str(several), tmp_path)


def test_a_conversion_reports_progress(gguf_file: Path, tmp_path: Path) -> None:
    shares: list[float] = []
    resolve(str(gguf_file), tmp_path, lambda _what, fraction: shares.append(fraction))
    assert shares == sorted(shares)
    assert len(set(shares)) >= 5
    shown: list[float] = []
    bars = convert._Bars(shown.append)
    for percent in (0, 4, 12, 13, 57, 100):
        bars.write(f"\rDequantising: {percent:3}%|###   | 3/272 [00:01<00:40]")
    assert shown == [0.12, 0.57, 1.0]


def test_other_content_under_the_same_name_is_another_model(
    gguf_file: Path, tmp_path: Path
) -> None:
    changed = tmp_path / gguf_file.name
    data = bytearray(gguf_file.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    assert model_files._fingerprint([changed]) != model_files._fingerprint([gguf_file])


def test_a_failed_conversion_leaves_no_files(gguf_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf_file.read_bytes()[:2000])
    with pytest.raises(ModelUnusableError, match=r"broken\.gguf cannot be converted"):
        resolve(str(broken), tmp_path / "cache")
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir()]
    assert all(name.endswith(".lock") for name in left)


def _resolve_in_child(model: str, cache: str, answers: multiprocessing.Queue[str]) -> None:
    answers.put(
        str(resolve(model, cache, lambda what, fraction: answers.put(f"{what} {fraction}")))
    )


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(model_files.CacheUnusableError) as caught:
        resolve(str(gguf_file), tmp_path / "file" / "cache")
    assert str(caught.value) == (
        f"cannot write to {tmp_path}/file/cache: Not a directory; choose another folder with "
        "--cache-dir"
    )


@pytest.mark.slow
def test_concurrent_processes_convert_a_file_once(gguf_file: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    children = [
        context.Process(target=_resolve_in_child, args=(str(gguf_file), str(tmp_path), answers))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(100)
    said = []
    while not answers.empty():
        said.append(answers.get())
    folders = [line for line in said if line.startswith("/")]
    assert len(folders) == 2
    assert len(set(folders)) == 1
    assert sum(line.endswith(" 0.05") for line in said) == 1, "more than one process converted"


def test_a_missing_package_of_a_built_in_model_is_named() -> None:
    missing = BuiltIn("some-wheel", (("no_such_module", "model.gguf"),))
    with pytest.raises(ModelNotFoundError, match="package some-wheel, which is not installed"):
        missing.files()


def test_an_unknown_name_is_refused_with_the_built_in_names(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m-instruct.*gemma3-270m"):
        resolve("no-such/model", tmp_path)


def test_a_file_of_another_kind_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFoundError, match=r"/model\.bin is a file, but no \.gguf file$"):
        resolve(str(tmp_path / "model.bin"))
    with pytest.raises(ModelNotFoundError, match=r"^there is no folder or file /.*/nowhere$"):
        resolve(str(tmp_path / "nowhere"))


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"there is no file .*none\.gguf"):
        resolve(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("with_code", [False, True])
def test_a_model_s_own_code_is_fetched_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_code: bool
) -> None:
    """The test has no access to the hub itself."""
    (tmp_path / "model.safetensors").touch()
    asked: list[list[str]] = []

    def snapshot(model: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("somebody/model", with_code=with_code) == tmp_path
    assert ("*.py" in asked[0]) == with_code
    assert "*.safetensors" in asked[0]
