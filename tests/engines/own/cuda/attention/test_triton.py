"""The Triton backend's own ways: split contexts, strided inputs, padded launches, how a launch is
planned.

Kernels run where there is CUDA, or where this process interprets Triton: test_interpreted starts
one.
"""

from __future__ import annotations

import dataclasses

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
from tokenmill_worker.engines.own.attention.base import AttentionMetadata, AttentionShape
from tokenmill_worker.engines.own.config.cache import Window

pytest.importorskip("triton")
from tokenmill_worker.engines.own.cuda.attention.launch_plan import Launch, plan_launch
from tokenmill_worker.engines.own.cuda.attention.triton import TritonAttention, is_interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not is_interpreted(), reason="neither CUDA nor interpreted"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]

SPLIT_CASES = [
    Case("split decodes", ((1, 300), (1, 3), (1, 270))),
    Case("three splits", ((1, 700), (1, 3))),
    Case(
        "split decodes, window, sinks",
        ((1, 400), (1, 3)),
        window=Window(300),
        has_sinks=True,
        block_size=8,
    ),
    Case("split decodes, chunks", ((1, 900), (1, 513)), window=Window(512, is_chunked=True)),
    Case(
        "split chunk, softcap",
        ((2, 290), (1, 20)),
        num_heads=3,
        num_kv_heads=1,
        softcap=9.0,
        head_dim=80,
    ),
]


@kernels
@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case.name)
def test_split_contexts_give_dense_attention(case: Case) -> None:
    problem = make_problem(case, DEVICE)
    backend = TritonAttention(num_multiprocessors=32)
    metadata = metadata_of(problem, case.lens)
    assert is_split(metadata, case.shape, len(problem.query), num_multiprocessors=32)
    result = attend(backend, problem, filled_cache(backend, problem))
    torch.testing.assert_close(result.double(), dense(problem), rtol=2e-5, atol=2e-5)


@kernels
@pytest.mark.parametrize("num_multiprocessors", [1, 32])
def test_full_and_partial_last_tiles_give_dense_attention(num_multiprocessors: int) -> None:
    """Full tiles are read without masks; a tile has 32 keys here, a row's own token is the last."""
    case = Case("tiles", ((1, 31), (1, 32), (1, 33), (1, 64), (1, 1), (20, 64), (33, 97), (32, 32)))
    problem = make_problem(case, DEVICE)
    backend = TritonAttention(num_multiprocessors)
    result = attend(backend, problem, filled_cache(backend, problem))
    torch.testing.assert_close(result.double(), dense(problem), rtol=2e-5, atol=2e-5)


@kernels
@pytest.mark.parametrize("num_multiprocessors", [1, 32])
@pytest.mark.parametrize("magnitude", [1.0, 1e6, 0.0])
def test_queries_over_8_bits_may_be_of_any_magnitude(
    magnitude: float, num_multiprocessors: int
) -> None:
    """bfloat16 queries are multiplied in float16, which ends at 65,504."""
    case = Case("8 bits", ((1, 300), (20, 33), (1, 1)), scale=0.125 / (magnitude or 1.0))
    problem = make_problem(case, DEVICE)
    query = (problem.query * magnitude).bfloat16()
    problem = dataclasses.replace(problem, query=query)
    backend, dtype = TritonAttention(num_multiprocessors), torch.float8_e4m3fn
    result = attend(backend, problem, filled_cache(backend, problem, dtype))
    round_as_stored(problem, dtype)
    torch.testing.assert_close(result.double(), dense(problem), rtol=1e-2, atol=1e-2)


@kernels
def test_a_long_context_among_short_ones_is_split() -> None:
    """The shares of short contexts are empty but for the first: nothing is stored for them."""
    lens = ((1, 2100), *((1, 40),) * 3, (1, 1100))
    case = Case("uneven", lens, num_heads=2, num_kv_heads=1)
    problem = make_problem(case, DEVICE)
    backend = TritonAttention(num_multiprocessors=2)
    metadata = metadata_of(problem, case.lens)
    assert is_split(metadata, case.shape, len(problem.query), num_multiprocessors=2)
    even = dataclasses.replace(metadata, max_seq_len=1100)
    assert not is_split(even, case.shape, len(problem.query), num_multiprocessors=2)
    result = attend(backend, problem, filled_cache(backend, problem))
    torch.testing.assert_close(result.double(), dense(problem), rtol=2e-5, atol=2e-5)


@kernels
def test_inputs_may_be_views_of_one_packed_projection() -> None:
    case = Case("packed", ((20, 20), (1, 1)))
    problem = make_problem(case, DEVICE)
    backend = TritonAttention()
    metadata = metadata_of(problem, case.lens)
    packed = torch.cat([problem.query, problem.key, problem.value], dim=1)
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


@kernels
@pytest.mark.parametrize("num_multiprocessors", [1, 32])
def test_a_padded_launch_gives_the_same_rows(num_multiprocessors: int) -> None:
    """A captured graph runs padded: more sequences and tokens than there are, larger maxima."""
    case = Case("padded", ((1, 300), (1, 7)))
    problem = make_problem(case, DEVICE)
    backend = TritonAttention(num_multiprocessors)
    cache = filled_cache(backend, problem)
    expected = attend(backend, problem, cache)
    exact = metadata_of(problem, case.lens)
    padded = dataclasses.replace(
        exact,
        query_start=torch.cat([exact.query_start, exact.query_start[-1:].repeat(2)]),
        seq_lens=torch.cat([exact.seq_lens, exact.seq_lens.new_zeros(2)]),
        block_table=torch.cat([exact.block_table, torch.zeros_like(exact.block_table)]),
        max_seq_len=512,
        query_lens_host=(1, 1, 0, 0),
    )
    query = torch.cat([problem.query, torch.full_like(problem.query, torch.nan)])
    result = backend.attend(query, cache, padded, case.shape)
    torch.testing.assert_close(result[:2], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(result[2:], torch.zeros_like(result[2:]))


@kernels
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_decode_in_a_graph_needs_no_initialised_memory(has_sinks: bool) -> None:
    """The first sequence is folded, the second written by its only split; new memory holds NaN."""
    case = Case("graph", ((1, 300), (1, 40)), has_sinks=has_sinks)
    problem = make_problem(case, DEVICE)
    backend = TritonAttention(num_multiprocessors=32)
    cache = filled_cache(backend, problem)
    exact = metadata_of(problem, case.lens)
    captured = dataclasses.replace(exact, max_seq_len=2048, query_lens_host=(), seq_lens_host=())
    assert is_split(captured, case.shape, 2, num_multiprocessors=32)
    torch.use_deterministic_algorithms(True)  # torch then fills new memory
    try:
        result = backend.attend(problem.query, cache, captured, case.shape, problem.sinks)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(result.double(), dense(problem), rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(is_interpreted(), reason="the kernels are interpreted in this process")
def test_a_kernel_build_serves_inputs_of_any_alignment_and_table_width() -> None:
    """They are parts of one copy: builds by alignment or by width would interrupt the service for
    seconds each.
    """
    from tokenmill_worker.engines.own.cuda.attention.triton_kernels import attend_kernel
    from tokenmill_worker.engines.own.cuda.attention.write_kernel import write_kernel

    loose = {
        parameter.name
        for kernel in (attend_kernel, write_kernel)
        for parameter in kernel.params
        if parameter.do_not_specialize_on_alignment or parameter.do_not_specialize
    }
    assert {
        "block_table",
        "query_start",
        "seq_lens",
        "prefix_lens",
        "slots",
        "num_seqs",
        "num_tokens",
        "table_stride",
        "least_tiles",
    } <= loose


def launch_of(
    metadata: AttentionMetadata,
    shape: AttentionShape,
    num_tokens: int,
    num_multiprocessors: int = 132,
) -> Launch:
    return plan_launch(
        shape, metadata, num_tokens,
        element_size=2, num_multiprocessors=num_multiprocessors, has_warp_groups=True,
        is_exact=False,
    )  # fmt: skip


def is_split(
    metadata: AttentionMetadata,
    shape: AttentionShape,
    num_tokens: int,
    num_multiprocessors: int = 132,
) -> bool:
    return launch_of(metadata, shape, num_tokens, num_multiprocessors).is_split


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        (((1, 60),), False),  # short: folding would cost more
        (((1, 32_768),), True),  # one stream alone would keep 8 of 132 multiprocessors busy
        (((1, 2000),) * 64, False),  # enough programs without
        # enough programs, but the longest would take as long as before
        (((1, 40),) * 63 + ((1, 16_384),), True),
        (((4096, 4096),), False),
        (((64, 32_768),), True),  # a small chunk deep in a long prompt
        (((2048, 32_768),), False),  # a large one
    ],
    ids=["short", "one long", "many", "one long of many", "prompt", "late chunk", "chunk"],
)
def test_contexts_are_split_where_programs_are_few(
    lens: tuple[tuple[int, int], ...], *, expected: bool
) -> None:
    shape = AttentionShape(32, 8, 128, 0.1)
    num_tokens = sum(query_len for query_len, _ in lens)
    empty = torch.zeros(len(lens), dtype=torch.int32)
    metadata = AttentionMetadata(
        empty, empty, empty, empty, max(q for q, _ in lens), max(s for _, s in lens), 16, None
    )
    assert is_split(metadata, shape, num_tokens) == expected


def test_a_decode_has_one_program_for_each_sequence_and_head() -> None:
    shape = AttentionShape(32, 8, 128, 0.1)
    empty = torch.zeros(256, dtype=torch.int32)
    metadata = AttentionMetadata(empty, empty, empty, empty, 1, 500, 16, None)
    assert launch_of(metadata, shape, 256).num_programs == 256


def test_a_short_window_is_not_split() -> None:
    """A program's tokens decide on splits, not the step's."""
    shape, empty = AttentionShape(32, 8, 128, 0.1), torch.zeros(1, dtype=torch.int32)
    metadata = AttentionMetadata(empty, empty, empty, empty, 256, 32_768, 16, Window(128))
    assert not is_split(metadata, shape, 256)


def test_a_program_handles_whole_groups_of_query_heads() -> None:
    for group in (1, 3, 7, 12, 24, 71):
        shape = AttentionShape(group * 2, 2, 128, 0.1)
        for max_query_len, num_tokens in ((1, 8), (300, 307)):
            empty = torch.zeros(8, dtype=torch.int32)
            metadata = AttentionMetadata(empty, empty, empty, empty, max_query_len, 4096, 16, None)
            launch = launch_of(metadata, shape, num_tokens)
            assert launch.block_tokens >= 1
            assert launch.block_tokens * group <= launch.block_rows
            assert launch.block_rows & (launch.block_rows - 1) == 0
