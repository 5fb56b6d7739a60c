"""Compares decodes over a common prefix, read once for all sequences, with dense attention.

Kernels run where there is CUDA, or where this process interprets Triton: test_interpreted starts
one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.own.attention.cases import (
    Case,
    Problem,
    dense,
    filled_cache,
    make_problem,
    metadata_of,
    round_as_stored,
)
from tests.engines.own.cuda.steps import fake_capture
from tests.engines.own.truth import tiny_models
from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.attention import common_prefix
from tokenmill_worker.engines.own.attention.base import AttentionMetadata, CommonPrefix
from tokenmill_worker.engines.own.attention.common_prefix import find_prefix

pytest.importorskip("triton")
from tokenmill_worker.engines.own.cuda.attention.triton import TritonAttention, is_interpreted
from tokenmill_worker.engines.own.cuda.graphs import GraphRunner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.skipif(
        DEVICE == "cpu" and not is_interpreted(), reason="neither CUDA nor interpreted"
    ),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]
# tokens of prefixes: whole blocks, but no whole tiles; the long one is split
SHORT, LONG = (144, 528)
OWN = (1, 2, 16, 17, 40, 96, 5, 300)  # behind the prefix; a context may end one token after it


@dataclasses.dataclass(frozen=True, slots=True)
class Prefixed:
    """A decode whose sequences but one begin alike, and what its prefix is."""

    problem: Problem
    metadata: AttentionMetadata


def prefixed(case: Case, stray: int | None = None) -> Prefixed:
    """Make the problem; the sequence `stray` has the first block in common, and no other."""
    alike = min(length for _, length in case.lens) - 1
    problem, blocks = make_problem(case, "cpu"), alike // case.block_size
    start = 0
    for seq, (_, length) in enumerate(case.lens):
        shared = blocks if seq != stray else 1
        problem.table[seq, :shared] = problem.table[-1, :shared]
        for stored in (problem.key, problem.value):
            last = len(stored) - case.lens[-1][1]
            alike = shared * case.block_size
            stored[start : start + alike] = stored[last : last + alike]
        start += length
    problem = dataclasses.replace(
        problem,
        query=problem.query.to(DEVICE),
        key=problem.key.to(DEVICE),
        value=problem.value.to(DEVICE),
        sinks=None if problem.sinks is None else problem.sinks.to(DEVICE),
        table=problem.table.to(DEVICE),
    )
    metadata = metadata_of(problem, case.lens)
    found = find_prefix(
        metadata.block_table.cpu().numpy(), metadata.seq_lens.cpu().long().numpy(),
        case.block_size, 1,
    )  # fmt: skip
    assert found is not None
    assert found.lens.tolist() == [0 if i == stray else alike for i in range(len(case.lens))]
    lens, bounds = (torch.from_numpy(each).int().to(DEVICE) for each in (found.lens, found.bounds))
    prefix = CommonPrefix(lens, bounds, metadata.block_table[found.leader])
    return Prefixed(problem, dataclasses.replace(metadata, prefix=prefix))


@pytest.fixture(autouse=True)
def small_decodes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_prefix, "LEAST_TOKENS", SHORT)
    monkeypatch.setattr(common_prefix, "LEAST_SEQS", 8)


def decodes(count: int, alike: int = SHORT) -> tuple[tuple[int, int], ...]:
    return tuple((1, alike + OWN[i % len(OWN)]) for i in range(count))


def result_of(step: Prefixed, backend: TritonAttention, cache: torch.Tensor) -> torch.Tensor:
    problem = step.problem
    return backend.attend(
        problem.query, cache, step.metadata, problem.case.shape, problem.sinks
    ).double()


@pytest.mark.parametrize(
    ("case", "stray", "num_multiprocessors"),
    [
        (Case("groups of 4", decodes(8), num_kv_heads=1, head_dim=16), None, 1),
        (Case("groups of 7", decodes(9), num_heads=7, num_kv_heads=1, head_dim=24), 3, 1),
        (
            Case("splits, softcap, sinks", decodes(9, LONG), 4, 1, 16, softcap=5.0, has_sinks=True),
            0,
            7,
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_a_common_prefix_read_once_gives_dense_attention(
    case: Case, stray: int | None, num_multiprocessors: int
) -> None:
    step, backend = prefixed(case, stray), TritonAttention(num_multiprocessors)
    result = result_of(step, backend, filled_cache(backend, step.problem))
    torch.testing.assert_close(result, dense(step.problem), rtol=2e-5, atol=2e-5)


def test_a_common_prefix_over_an_8_bit_cache_gives_dense_attention() -> None:
    case, dtype = Case("8 bits", decodes(8), num_kv_heads=1, head_dim=16), torch.float8_e4m3fn
    step, backend = prefixed(case), TritonAttention(num_multiprocessors=1)
    cache = filled_cache(backend, step.problem, dtype)
    round_as_stored(step.problem, dtype)
    torch.testing.assert_close(
        result_of(step, backend, cache), dense(step.problem), rtol=2e-5, atol=2e-5
    )


def test_graphs_of_decodes_with_a_common_prefix_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes of three sequences are padded to four; without CUDA a graph is a call."""
    for name, least in (("LEAST_TOKENS", 16), ("LEAST_SEQS", 2), ("LEAST_BYTES", 1)):
        monkeypatch.setattr(common_prefix, name, least)
    folder = tiny_models.save("llama_mqa", tmp_path, num_layers=1)
    settings: dict[str, Any] = {
        "model": str(folder), "dtype": "float32", "block_size": 8, "num_blocks": 30,
        "max_num_seqs": 3, "max_num_batched_tokens": 200, "async_batching": False, "fuse": False,
    }  # fmt: skip
    prompts = [[*range(10, 30), *range(50, 51 + i)] for i in range(3)]
    once = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    answers = []
    for device, attention in (("cpu", "reference"), (DEVICE, "triton")):
        place: dict[str, Any] = {"device": device, "attention": attention, "cuda_graphs": True}
        with CollectingEngine.load(EngineConfig(**settings, **place)) as engine:
            runner: Any = engine.runner
            if attention == "triton":
                info = runner.info
                runner.graphs = runner.graphs or GraphRunner(
                    runner.forward, info.config, info.max_model_len, fake_capture
                )
            answers.append([output.token_ids for output in engine.generate_batch(prompts, once)])
            shapes = runner.graphs.shapes if attention == "triton" else ()
    assert answers[0] == answers[1]
    assert {(shape.num_seqs, shape.prefixed) for shape in shapes} >= {(4, (0,))}
