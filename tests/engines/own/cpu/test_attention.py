"""The CPU kernel's bits do not depend on batch, chunk or threads; the contract asks less."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engines.own.attention.cases import (
    Case,
    attend,
    dense,
    filled_cache,
    make_problem,
    metadata_of,
    round_as_stored,
    with_threads,
)
from tests.engines.own.attention.test_backends import CASES
from tests.engines.own.cpu.instruction_sets import skip_unless_runs
from tests.support.marks import long_unless
from tokenmill_worker.engines.own.attention.base import AttentionShape, stored_as
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.cpu.attention import CpuAttention
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]
LENS = ((1, 700), (40, 300), (1, 17), (256, 256))


@pytest.fixture(scope="module")
def backend() -> CpuAttention:
    reason = CpuAttention.why_not(
        torch.device("cpu"), torch.float32, AttentionShape(4, 2, 64, 1.0), 16
    )
    if reason is not None:
        pytest.skip(reason)
    return CpuAttention(uses_amx=False)


def one_by_one(backend: CpuAttention, case: Case) -> tuple[Tensor, Tensor]:
    """All rows of a case in one call, and the same rows as one-token steps, a sequence at a
    time.
    """
    problem = make_problem(case)
    cache = filled_cache(backend, problem)
    together, alone, row = attend(backend, problem, cache), [], 0
    for i, (query_len, seq_len) in enumerate(case.lens):
        for position in range(seq_len - query_len, seq_len):
            metadata = metadata_of(problem, ((1, position + 1),), torch.tensor([i]))
            alone.append(
                backend.attend(
                    problem.query[row : row + 1], cache, metadata, case.shape, problem.sinks
                )
            )
            row += 1
    return together, torch.cat(alone)


@pytest.mark.parametrize(
    "case",
    [
        Case("grouped", LENS, num_heads=9, num_kv_heads=3),
        Case("window and softcap", LENS, window=Window(100), softcap=8.0),
        Case("blocks of 8", LENS, block_size=8),
        Case("head 72 and sinks", LENS, head_dim=72, has_sinks=True),
        Case("half", LENS, dtype=torch.float16),
    ],
    ids=lambda case: case.name,
)
def test_a_row_has_the_same_bits_in_a_chunk_as_alone(backend: CpuAttention, case: Case) -> None:
    together, alone = one_by_one(backend, case)
    assert torch.equal(together, alone)


def test_the_number_of_threads_changes_no_bit(backend: CpuAttention) -> None:
    problem = make_problem(
        Case("threads", ((1, 900), (30, 500), (1, 80)), num_heads=6, num_kv_heads=2)
    )
    cache = filled_cache(backend, problem)
    results = with_threads((1, 2, 5), backend, problem, cache)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kv_dtype", NARROW)
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_narrow_cache_rounds_keys_and_values_only(
    backend: CpuAttention, kv_dtype: torch.dtype, block_size: int
) -> None:
    problem = make_problem(Case("storage", ((1, 300), (50, 90)), block_size=block_size))
    result = attend(backend, problem, filled_cache(backend, problem, kv_dtype))
    round_as_stored(problem, kv_dtype)
    torch.testing.assert_close(result.double(), dense(problem), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_values_are_rounded_to_narrow_types_as_by_torch(
    backend: CpuAttention, kv_dtype: torch.dtype
) -> None:
    """Every exponent, ties, subnormals and overflow; the one value in the cache is also read back
    as stored.
    """
    bits = torch.arange(0, 2**32, 70_001, dtype=torch.int64).to(torch.uint32)
    ties = torch.arange(0, 2**16, 7, dtype=torch.int64) * 2**16 + 2**15
    values = torch.cat([bits.view(torch.float32), ties.to(torch.uint32).view(torch.float32)])
    values = values[values.isfinite()]
    values = values[: values.numel() // 64 * 64].view(-1, 1, 1, 64)
    problem = make_problem(Case("rounding", ((1, 1),), num_heads=1, num_kv_heads=1))
    cache, metadata = filled_cache(backend, problem, kv_dtype), metadata_of(problem, ((1, 1),))
    for value in values:
        stored = stored_as(value, kv_dtype)
        backend.write(torch.zeros_like(value), value, cache, metadata)
        assert torch.equal(cache[1, 1, 0, 0].view(torch.uint8), stored[0, 0].view(torch.uint8))
        if stored.float().isfinite().all():
            assert torch.equal(
                backend.attend(problem.query, cache, metadata, problem.case.shape), stored.float()
            )


def test_inputs_may_be_views_of_one_packed_projection(backend: CpuAttention) -> None:
    case = Case("packed", ((30, 30), (4, 4)), num_heads=4, num_kv_heads=2)
    problem = make_problem(case)
    packed = torch.cat([problem.query, problem.key, problem.value], dim=1)
    metadata = metadata_of(problem, case.lens)
    cache = filled_cache(backend, problem)
    expected = attend(backend, problem, cache)
    cache.fill_(torch.nan)
    backend.write(packed[:, 4:6], packed[:, 6:8], cache, metadata)
    assert torch.equal(backend.attend(packed[:, :4], cache, metadata, case.shape), expected)
    cache.fill_(torch.nan)
    # as Transformers' rotary embedding leaves them
    by_head = packed.transpose(0, 1).contiguous().transpose(0, 1)
    backend.write(by_head[:, 4:6], by_head[:, 6:8], cache, metadata)
    assert torch.equal(backend.attend(by_head[:, :4], cache, metadata, case.shape), expected)


@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rope_and_write_equals_rope_then_write(backend: CpuAttention, rotary_dim: int) -> None:
    case = Case("rope", ((30, 30), (4, 4)), num_heads=4, num_kv_heads=2)
    problem = make_problem(case)
    metadata = metadata_of(problem, case.lens)
    angles = torch.rand(34, rotary_dim // 2) * 6
    cos, sin = (torch.cat([f(angles), f(angles)], dim=-1) for f in (torch.cos, torch.sin))
    cache = filled_cache(backend, problem)
    backend.write(rotate(problem.key, cos, sin), problem.value, cache, metadata)
    expected = cache.clone()
    cache.fill_(torch.nan)
    rotated = backend.rope_and_write(
        problem.query, problem.key, problem.value, cos, sin, cache, metadata
    )
    torch.testing.assert_close(rotated, rotate(problem.query, cos, sin), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cache, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]
    return torch.cat([turned, kept], dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "march", long_unless({"x86-64", "x86-64-v3"}, ["x86-64", "x86-64-v3", "x86-64-v4"])
)
def test_attention_is_the_same_with_every_vector_width(march: str) -> None:
    """The paths that this machine would not choose: 128 bits without fused multiply-add, and
    AVX2.
    """
    skip_unless_runs(march)
    try:
        backend = CpuAttention(march=march, uses_amx=False)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    for case in CASES:
        for kv_dtype in (torch.float32, *NARROW):
            problem = make_problem(case)
            result = attend(backend, problem, filled_cache(backend, problem, kv_dtype))
            round_as_stored(problem, kv_dtype)
            torch.testing.assert_close(result.double(), dense(problem), rtol=2e-5, atol=2e-5)


def test_padding_rows_come_back_as_zeros(backend: CpuAttention) -> None:
    problem = make_problem(Case("padded", ((1, 20), (1, 5))))
    cache = filled_cache(backend, problem)
    metadata = metadata_of(problem, problem.case.lens)
    padded = torch.cat([problem.query, torch.full_like(problem.query, torch.nan)])
    result = backend.attend(padded, cache, metadata, problem.case.shape)
    assert torch.equal(result[:2], attend(backend, problem, cache))
    assert torch.equal(result[2:], torch.zeros(2, 4, 64))


def test_a_nan_in_the_inputs_reaches_the_output(backend: CpuAttention) -> None:
    problem = make_problem(Case("nan", ((1, 20), (1, 5))))
    cache = filled_cache(backend, problem)
    problem.query[0] = torch.nan
    result = attend(backend, problem, cache)
    assert result[0].isnan().all()
    assert result[1].isfinite().all()


def test_without_a_compiler_the_reference_is_chosen_with_its_reason(tmp_path: Path) -> None:
    script = (
        "import torch; from tokenmill_worker.engines.own.attention import AttentionShape, choose\n"
        "shapes = [AttentionShape(4, 2, 64, 0.1), AttentionShape(4, 2, 128, 0.1)]\n"
        "print(choose('auto', torch.device('cpu'), torch.float32, shapes, 16).name)"
    )
    bare = ("env", "-i", f"HOME={tmp_path}", "PATH=/nonexistent", f"PYTHONPATH={Path.cwd()}")
    command = [*bare, sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert result.stdout.strip() == "reference"
    assert result.stderr.count("no C++ compiler found") == 1


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "word"),
    [
        ("cuda", torch.float32, 64, "cuda"),
        ("cpu", torch.float64, 64, "float64"),
        ("cpu", torch.float32, 60, "60"),
        ("cpu", torch.float32, 1032, "1032"),
    ],
)
def test_unsupported_shapes_are_rejected_with_a_reason(
    device: str, dtype: torch.dtype, head_dim: int, word: str
) -> None:
    reason = CpuAttention.why_not(
        torch.device(device), dtype, AttentionShape(4, 2, head_dim, 1.0), 16
    )
    assert reason is not None
    assert word in reason


def test_metadata_advanced_in_place_gives_the_attention_of_the_new_lengths(
    backend: CpuAttention,
) -> None:
    """A call does not reuse what an earlier call derived from the same metadata object."""
    problem = make_problem(
        Case("counted up", ((1, 600), (1, 30), (1, 270)), num_heads=6, num_kv_heads=2)
    )
    cache = filled_cache(backend, problem)
    metadata = metadata_of(problem, ((1, 254), (1, 14), (1, 255)))
    for _ in range(4):
        found = backend.attend(problem.query, cache, metadata, problem.case.shape)
        lens = tuple((1, int(length)) for length in metadata.seq_lens)
        expected = CpuAttention(uses_amx=False).attend(
            problem.query, cache, metadata_of(problem, lens), problem.case.shape
        )
        assert torch.equal(found, expected)
        metadata.seq_lens.add_(1)
