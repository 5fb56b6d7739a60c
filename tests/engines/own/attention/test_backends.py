"""Every attention backend equals dense float64 attention on the shapes that occur.

The Triton backend runs here on CUDA, or where this process interprets Triton (test_interpreted
starts one).
"""

from __future__ import annotations

import pytest
import torch

from tests.engines.own.attention.cases import (
    Case,
    attend,
    dense,
    filled_cache,
    make_problem,
    metadata_of,
    round_as_stored,
)
from tokenmill_worker.engines.own.attention.base import AttentionBackend, AttentionShape, stored_as
from tokenmill_worker.engines.own.attention.registry import backend_class, backend_names
from tokenmill_worker.engines.own.config.cache import Window

RAGGED = ((1, 70), (17, 17), (1, 1), (19, 51), (1, 300), (2, 290), (34, 150))
SHORT = ((1, 40), (17, 17), (5, 60))
CHUNKS_OF_24, CHUNKS_OF_256 = (Window(size, is_chunked=True) for size in (24, 256))

CASES = [
    Case("grouped", RAGGED, num_heads=9, num_kv_heads=3),
    Case("multi-query", RAGGED, num_heads=8, num_kv_heads=1),
    Case("multi-head", RAGGED, num_heads=2, num_kv_heads=2),
    Case("many heads a group", SHORT, num_heads=28, num_kv_heads=2),
    Case("only decodes", tuple((1, n) for n in (1, 15, 16, 17, 31, 255, 256, 257, 520))),
    Case("one decode", ((1, 700),), num_heads=2, num_kv_heads=1),
    Case("whole prompts", ((5, 5), (260, 260), (1, 1))),
    Case("head 80", SHORT, head_dim=80),
    Case("head 96", SHORT, head_dim=96),
    Case("head 128", RAGGED, head_dim=128),
    Case("head 256", SHORT, head_dim=256, num_heads=4, num_kv_heads=1),
    Case("latent of 20 heads", SHORT, head_dim=576, num_heads=20, num_kv_heads=1),
    Case("latent of 128 heads", SHORT[::2], head_dim=576, num_heads=128, num_kv_heads=1),
    Case("head 1,024", SHORT, head_dim=1024, num_heads=2, num_kv_heads=1),
    Case("blocks of 8", RAGGED, block_size=8),
    Case("blocks of 32", RAGGED, block_size=32),
    Case("blocks of 64", RAGGED, block_size=64),
    Case("head 80, blocks of 8", SHORT, head_dim=80, block_size=8),
    Case("window", RAGGED, window=Window(24)),
    Case("window of 1", SHORT, window=Window(1)),
    Case("wide window, blocks of 8", RAGGED, window=Window(129), block_size=8),
    Case("window across tiles", ((1, 600), (40, 580)), window=Window(300)),
    Case("chunks", RAGGED, window=CHUNKS_OF_24),
    Case("chunks across tiles", ((1, 600), (120, 600), (1, 512)), window=CHUNKS_OF_256),
    Case("chunks, softcap and sinks", SHORT, window=CHUNKS_OF_24, softcap=5.0, has_sinks=True),
    Case("softcap", RAGGED, softcap=5.0),
    Case("sinks", RAGGED, has_sinks=True),
    Case("sinks and window", RAGGED, has_sinks=True, window=Window(16)),
    Case(
        "all at once",
        RAGGED,
        window=Window(40),
        softcap=20.0,
        has_sinks=True,
        head_dim=96,
        block_size=32,
    ),
    Case("other scale", SHORT, scale=0.3),
]
HALF_CASES = [
    Case("bf16", RAGGED, dtype=torch.bfloat16),
    Case("fp16", RAGGED, dtype=torch.float16),
    Case("bf16, head 128, window", RAGGED, head_dim=128, window=Window(24), dtype=torch.bfloat16),
    Case("fp16, blocks of 256", RAGGED, block_size=256, dtype=torch.float16),
    Case(
        "bf16, blocks of 256, window, sinks",
        RAGGED,
        block_size=256,
        window=Window(50),
        has_sinks=True,
        dtype=torch.bfloat16,
    ),
]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def on_gpu(name: str) -> object:
    return pytest.param(name, "cuda", marks=pytest.mark.gpu, id=f"{name}-cuda")


TARGETS = [
    *(pytest.param(name, "cpu", id=name) for name in ("reference", "cpu", "triton")),
    *(on_gpu(name) for name in backend_names() if name != "cpu"),
]


def make_backend(
    name: str, device: str, case: Case, kv_dtype: torch.dtype | None = None
) -> AttentionBackend:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    backend = backend_class(name)
    reason = backend.why_not(
        torch.device(device), kv_dtype or case.dtype, case.shape, case.block_size
    )
    if reason is not None:
        pytest.skip(reason)
    return backend()


# Triton's interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize(("name", "device"), TARGETS)
@pytest.mark.parametrize("case", CASES + HALF_CASES, ids=lambda case: case.name)
def test_each_backend_equals_dense_attention(name: str, device: str, case: Case) -> None:
    backend = make_backend(name, device, case)
    problem = make_problem(case, device)
    result = attend(backend, problem, filled_cache(backend, problem))
    assert result.dtype == case.dtype
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(result.double(), dense(problem), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize(("name", "device"), TARGETS)
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        pytest.param(torch.float8_e4m3fn, CASES[0], id=f"8 bits, {CASES[0].name}"),
        pytest.param(torch.float8_e5m2, CASES[-2], id=f"8 bits, {CASES[-2].name}"),
    ],
)
def test_an_8_bit_cache_rounds_keys_and_values_only(
    name: str, device: str, dtype: torch.dtype, case: Case
) -> None:
    backend = make_backend(name, device, case, dtype)
    problem = make_problem(case, device)
    for stored in (problem.key, problem.value):  # beyond the largest number, and the smallest
        stored.view(-1)[:4] = torch.tensor([6e4, -1e30, 460.0, 2.0**-9])
    result = attend(backend, problem, filled_cache(backend, problem, dtype))
    round_as_stored(problem, dtype)
    torch.testing.assert_close(result.double(), dense(problem), rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize(("name", "device"), TARGETS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["E4M3", "E5M2"])
def test_every_number_is_rounded_to_the_nearest_of_8_bits(
    name: str, device: str, dtype: torch.dtype
) -> None:
    """Ties, subnormals, carries and what is too large; a backend's blocks hold what the others'
    do.
    """
    case = Case("rounding", ((64, 64),), num_heads=1, num_kv_heads=1)
    backend = make_backend(name, device, case, dtype)
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    each = torch.cat(
        [numbers, middles, middles.nextafter(numbers[1:]), middles.nextafter(numbers[:-1])]
    )
    each = torch.cat([each, torch.tensor([449.0, 464.0, 57_345.0, 61_440.0, 1e9, -1e30])])
    values = torch.cat([each, torch.zeros(-len(each) % (64 * 64))]).view(-1, 64, 1, 64).to(device)
    problem = make_problem(case, device)
    metadata = metadata_of(problem, case.lens)
    blocks = metadata.block_table[0, : 64 // case.block_size].long()
    for value in values:
        cache = filled_cache(backend, problem, dtype)
        backend.write(value, value, cache, metadata)
        found = cache[blocks, 1].view(torch.uint8).flatten()
        assert torch.equal(found, stored_as(value, dtype).view(torch.uint8).flatten())


def test_every_backend_has_cases_in_this_file() -> None:
    assert set(backend_names()) == {"reference", "cpu", "triton", "flash"}


def test_a_gpu_backend_gives_the_reason_why_it_does_not_run_on_a_cpu() -> None:
    shape = AttentionShape(4, 2, 64, 0.125)
    reason = backend_class("flash").why_not(torch.device("cpu"), torch.bfloat16, shape, 256)
    assert reason is not None
    assert "cpu" in reason.lower()
