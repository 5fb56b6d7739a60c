"""Every way to run a step on the device gives the CPU's tokens: eager and graphs, synchronous and
ahead, with preemption and offload, adapters, several choices, greedy and seeded.

Without CUDA the same requests run on the CPU, where nothing is captured.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.engines.own.truth import tiny_models
from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig

pytest.importorskip("peft")
from tests.engines.own.lora.support import save_adapter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
AMPLE, SCARCE = 400, 26  # blocks
WAYS: dict[str, dict[str, object]] = {
    "eager": {"cuda_graphs": False, "async_batching": False},
    "ahead": {"cuda_graphs": False, "async_batching": True},
    "graphs": {"async_batching": False},
    "graphs ahead": {"async_batching": True},
    "the backend's block size": {"async_batching": True, "block_size": 0},
    "preempted": {"async_batching": True, "num_blocks": SCARCE},
    "offloaded": {"async_batching": True, "num_blocks": SCARCE, "cpu_offload_gib": 0.001},
    "not fused": {"async_batching": True, "fuse": False},
}
Answers = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a model with two layers and of an adapter for it."""
    base = tmp_path_factory.mktemp("tokens")
    model = tiny_models.save("qwen3", base / "model", num_layers=2)
    return model, save_adapter(model, base / "adapter", 1)


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> dict[bool, Answers]:
    """Return the CPU's answers, with the adapter and without."""
    plain = {"device": "cpu", "attention": "reference", "fuse": False, "async_batching": False}
    return {has_lora: answers(folders, has_lora, **plain)[0] for has_lora in (False, True)}


def requests(has_lora: bool) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(7)
    prompts, params = [], []
    for index in range(12):
        length = draw.choice([1, 5, 18, 33])
        prompts.append([draw.randrange(3, tiny_models.VOCAB) for _ in range(length)])
        is_greedy = index % 3 == 0
        params.append(
            SamplingParams(
                max_tokens=draw.choice([3, 12, 24]),
                temperature=0.0 if is_greedy else 0.9,
                top_p=0.9 if index % 2 else 1.0,
                top_k=40 if index % 4 == 1 else 0,
                seed=index,
                n=3 if index % 5 == 1 else 1,
                ignore_eos=True,
                lora="added" if has_lora and index % 2 else "",
            )
        )
    return prompts, params


def answers(
    folders: tuple[Path, Path], has_lora: bool, **changes: object
) -> tuple[Answers, CollectingEngine]:
    """Return the tokens of each request's choices, and the engine, closed."""
    model, adapter = folders
    settings: dict[str, object] = {
        "model": str(model), "dtype": "float32", "device": DEVICE, "block_size": 4,
        "num_blocks": AMPLE, "max_num_seqs": 8, "max_num_batched_tokens": 24,
        "q_padding_interval": 16, "kv_padding_interval": 32,
        "adapters": f"added={adapter}" if has_lora else "",
    }  # fmt: skip
    with CollectingEngine.load(EngineConfig(**{**settings, **changes})) as engine:  # type: ignore[arg-type]
        outputs = engine.generate_batch(*requests(has_lora))
    assert not [output.error for output in outputs if output.error]
    choices = [output.choices or (output,) for output in outputs]
    return [[choice.token_ids for choice in each] for each in choices], engine


@pytest.mark.parametrize("has_lora", [False, True], ids=["plain", "adapter"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_a_step_gives_the_cpu_s_tokens(
    way: str, has_lora: bool, folders: tuple[Path, Path], expected: dict[bool, Answers]
) -> None:
    found, engine = answers(folders, has_lora, **WAYS[way])
    assert found == expected[has_lora]
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total
    if "num_blocks" in WAYS[way]:
        assert stats.preemptions > 0
    if "cpu_offload_gib" in WAYS[way]:
        assert stats.blocks_swapped_in > 0
    graphs = getattr(engine.runner, "graphs", None)
    if graphs is not None:
        assert graphs.refusal is None
        assert graphs.num_replays > 0


def test_a_draft_model_changes_no_token(
    folders: tuple[Path, Path], expected: dict[bool, Answers]
) -> None:
    found, engine = answers(folders, False, draft_model=str(folders[0]), speculative_tokens=3)
    assert found == expected[False]
    assert engine.stats().accepted_tokens > 0


def test_calculated_scales_give_the_same_tokens_with_and_without_graphs(
    folders: tuple[Path, Path],
) -> None:
    scaled = {"kv_dtype": "float8_e4m3fn", "calculate_kv_scales": True}
    eager, _ = answers(folders, False, **scaled, **WAYS["eager"])
    assert answers(folders, False, **scaled, **WAYS["graphs ahead"])[0] == eager


def test_choices_and_adapters_give_different_answers(expected: dict[bool, Answers]) -> None:
    """Choices of one request differ, and so do the adapter's answers from the model's own."""
    drawn = [each for each in expected[False] if len(each) == 3]
    assert any(len(set(each)) == 3 for each in drawn)
    pairs = list(zip(expected[False], expected[True], strict=True))
    assert [plain != added for plain, added in pairs] == [bool(i % 2) for i in range(len(pairs))]
