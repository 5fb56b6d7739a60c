"""A model's generation_config.json gives the sampling defaults; a bad one is refused by name."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.model.generation_config import FILE, read_defaults

QWEN = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
    "transformers_version": "4.56.0",
}  # fmt: skip


def write(folder: Path, content: object) -> Path:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / FILE).write_text(text)
    return folder


def test_the_model_s_file_sets_only_the_defaults_that_it_states(tmp_path: Path) -> None:
    found = read_defaults("model", write(tmp_path, QWEN))
    assert found.params == SamplingParams(
        repetition_penalty=1.05, temperature=0.7, top_k=20, top_p=0.8
    )
    assert found.eos_token_ids == frozenset({151645, 151643})


def test_a_length_limit_and_a_single_end_token_are_read(tmp_path: Path) -> None:
    found = read_defaults(
        "model", write(tmp_path, {"max_new_tokens": 7, "min_p": 0.1, "eos_token_id": 2})
    )
    assert found.params == SamplingParams(max_tokens=7, min_p=0.1)
    assert found.eos_token_ids == frozenset({2})


@pytest.mark.parametrize(
    ("content", "temperature"),
    [({"do_sample": False, "temperature": 0.6}, 0.0), ({"temperature": 0.6}, 0.6), ({}, None)],
)
def test_a_model_that_does_not_sample_is_greedy(
    tmp_path: Path, content: dict[str, object], temperature: float | None
) -> None:
    assert read_defaults("model", write(tmp_path, content)).params.temperature == temperature


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    found = read_defaults("model", tmp_path)
    assert (found.params, found.eos_token_ids) == (SamplingParams(), None)


@pytest.mark.parametrize("setting", ["none", None])
def test_generation_config_none_keeps_only_the_end_tokens(
    tmp_path: Path, setting: str | None
) -> None:
    found = read_defaults(setting, write(tmp_path, QWEN | {"temperature": "warm"}))
    assert (found.params, found.eos_token_ids) == (SamplingParams(), frozenset({151645, 151643}))


def test_another_file_or_folder_replaces_the_model_s_file(tmp_path: Path) -> None:
    model = write(tmp_path / "model", {"temperature": 0.1, "eos_token_id": 5})
    other = write(tmp_path / "other", {"temperature": 0.9})
    for setting in (other, other / FILE):
        found = read_defaults(str(setting), model)
        assert (found.params.temperature, found.eos_token_ids) == (0.9, frozenset({5}))
    write(other, {"eos_token_id": [6, 7]})
    assert read_defaults(str(other), model).eos_token_ids == frozenset({6, 7})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"temperature": "warm"}, "Expected `float | null`, got `str` - at `$.temperature`"),
        ({"temperature": -1}, "Expected `float` >= 0.0 - at `$.temperature`"),
        ({"top_p": 1.5}, "Expected `float` <= 1.0 - at `$.top_p`"),
        ({"top_k": 2.5}, "Expected `int | null`, got `float` - at `$.top_k`"),
        ({"repetition_penalty": 0}, "Expected `float` >= 1e-06 - at `$.repetition_penalty`"),
        ({"max_new_tokens": 0}, "Expected `int` >= 1 - at `$.max_new_tokens`"),
        ({"do_sample": "yes"}, "Expected `bool | null`, got `str` - at `$.do_sample`"),
        ({"eos_token_id": ["</s>"]}, "Expected `int`, got `str` - at `$.eos_token_id[0]`"),
        ([], "Expected `object`, got `array`"),
        ("{", "Input data was truncated"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, content: object, says: str) -> None:
    write(tmp_path, content)
    with pytest.raises(EngineConfigError) as caught:
        read_defaults("model", tmp_path)
    assert caught.value.problems == [f"{tmp_path / FILE} cannot be used: {says}"]


def test_a_missing_generation_config_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match="generation_config must be model, none, or"):
        read_defaults(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(EngineConfigError, match="generation_config must be model, none, or"):
        read_defaults(str(tmp_path), tmp_path)


# ── in the engine ──

PROMPT = list(range(3, 15))


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def engine_of(folder: Path, setting: str = "model") -> CollectingEngine:
    return CollectingEngine.load(
        EngineConfig(
            model=str(folder), dtype="float32", device="cpu", num_blocks=64, num_threads=1,
            generation_config=setting,
        )
    )  # fmt: skip


def answer(engine: CollectingEngine, **params: object) -> tuple[int, ...]:
    base = SamplingParams(seed=4, ignore_eos=True, **params)  # type: ignore[arg-type]
    return engine.generate_batch([PROMPT], base)[0].token_ids


def test_defaults_apply_to_parameters_that_a_request_does_not_set(folder: Path) -> None:
    (folder / FILE).write_text(
        json.dumps(
            {"temperature": 0.4, "top_k": 7, "repetition_penalty": 1.9, "max_new_tokens": 24}
        )
    )
    named = {"temperature": 0.4, "top_k": 7, "repetition_penalty": 1.9, "max_tokens": 24}
    neutral = {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 24}
    with engine_of(folder, "none") as plain, engine_of(folder) as engine:
        assert answer(engine) == answer(plain, **named)
        assert answer(engine, top_k=0) == answer(plain, **(named | {"top_k": 0}))
        assert answer(engine, **neutral) == answer(plain, **neutral)
        assert answer(plain, max_tokens=24) == answer(plain, **neutral)
        assert len({answer(engine), answer(engine, top_k=0), answer(engine, **neutral)}) == 3


def test_a_default_max_tokens_never_refuses_a_request(folder: Path) -> None:
    (folder / FILE).write_text(json.dumps({"max_new_tokens": 100_000, "temperature": 0.0}))
    with engine_of(folder) as engine:
        length = engine.runner.info.max_model_len
        prompt = [3 + i % 20 for i in range(length - 4)]
        output = engine.generate_batch([prompt], SamplingParams(ignore_eos=True))[0]
        assert len(output.token_ids) == 4


def test_the_model_s_file_gives_the_answer_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    (folder / FILE).write_text(
        json.dumps({"do_sample": False, "repetition_penalty": 1.7, "max_new_tokens": 16})
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.tensor([PROMPT])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0)
    with engine_of(folder) as engine:
        assert list(answer(engine)) == wanted[0, len(PROMPT) :].tolist()
