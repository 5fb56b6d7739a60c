"""Runs the kernels' own division of query tokens and keys among programs.

It runs where there is CUDA, or where this process interprets Triton: test_interpreted starts one.
"""

# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from tokenmill_worker.engines.own.cuda.attention.split_kernels import (  # noqa: E402
    UNDIVIDED,
    find_work,
    share_of,
)
from tokenmill_worker.engines.own.cuda.attention.triton import is_interpreted  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 32
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.skipif(
        DEVICE == "cpu" and not is_interpreted(), reason="neither CUDA nor interpreted"
    ),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]


@triton.jit
def divide_kernel(
    query_start,
    seq_lens,
    prefix_lens,
    found,  # [programs, 5]: sequence, block, split, splits, share
    num_seqs,
    least_tiles,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    program = tl.program_id(0)
    share = UNDIVIDED
    if IS_SPLIT:
        share = share_of(
            query_start, seq_lens, prefix_lens, num_seqs, tl.num_programs(0), least_tiles,
            BLOCK_TOKENS, WINDOW, TILE_KEYS,
        )  # fmt: skip
    seq, block, split, splits = find_work(
        query_start, seq_lens, prefix_lens, num_seqs, program, tl.num_programs(0), share,
        BLOCK_TOKENS, WINDOW, TILE_KEYS,
    )  # fmt: skip
    at = found + program * 5
    tl.store(at, seq)
    tl.store(at + 1, block)
    tl.store(at + 2, split)
    tl.store(at + 3, splits)
    tl.store(at + 4, share)


def divided(
    lens: Sequence[tuple[int, int]],
    spare: int,
    *,
    block_tokens: int = 1,
    window: int = 0,
    least_tiles: int = 1,
    prefix: int = 0,
) -> list[list[int]]:
    """Return sequence, block, split, splits and share of each program, in the order of starting.

    `prefix` are tokens that all sequences longer than that have in common.
    """
    counts = torch.tensor([count for count, _ in lens])
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int().to(DEVICE)
    ends = torch.tensor([end for _, end in lens], dtype=torch.int32, device=DEVICE)
    programs = sum(-(-count // block_tokens) for count, _ in lens) + spare + 1
    found = torch.full((programs, 5), -7, dtype=torch.int32, device=DEVICE)
    divide_kernel[(programs,)](
        starts, ends, (ends > prefix).int() * prefix if prefix else None, found, len(lens),
        least_tiles,
        BLOCK_TOKENS=block_tokens, WINDOW=window, TILE_KEYS=TILE, IS_SPLIT=spare > 0,
    )  # fmt: skip
    return found.tolist()


@pytest.mark.parametrize(
    ("lens", "spare", "options"),
    [
        ([(1, 2000)], 12, {}),
        ([(1, 40), (1, 3), (1, 2000), (1, 32), (1, 1)], 12, {}),
        ([(1, 900), (1, 900), (0, 0), (0, 0)], 1, {}),
        ([(1, 33)] * 3 + [(0, 0)] * 200 + [(1, 900)] + [(1, 1)] * 7, 4, {}),
        ([(1, 5000)] * 3, 40, {"window": 100}),
        ([(50, 900), (1, 70), (16, 16), (1, 2000)], 20, {"block_tokens": 16}),
        ([(50, 900), (1, 70), (16, 16), (1, 2000)], 20, {"block_tokens": 16, "window": 300}),
        ([(50, 900), (1, 70), (17, 17), (1, 2000)], 0, {"block_tokens": 16}),
        ([(1, 3000), (1, 64)], 50, {"least_tiles": 9}),
    ],
)
def test_every_block_of_keys_belongs_to_one_split(
    lens: list[tuple[int, int]], spare: int, options: dict[str, int]
) -> None:
    work = [entry for entry in divided(lens, spare, **options) if entry[0] >= 0]
    tokens, wanted = options.get("block_tokens", 1), []
    for seq, (count, _) in enumerate(lens):
        for block in range(-(-count // tokens)):
            found = {entry[3] for entry in work if entry[:2] == [seq, block]}
            assert len(found) == 1, (seq, block)
            wanted += [[seq, block, split] for split in range(found.pop())]
    assert sorted(entry[:3] for entry in work) == wanted
    for seq, _, _, splits, share in work:
        end, window = lens[seq][1], options.get("window", 0)
        seen = min(end, window + tokens - 1) if window else end
        assert math.ceil(seen / TILE / splits) <= share + 1
        assert splits == 1 or share >= options.get("least_tiles", 1)


def test_tokens_of_a_common_prefix_belong_to_no_split() -> None:
    """Alike but for 64 tokens, 30 sequences leave the spare programs to one with 2,000 more."""
    work = divided([*((1, 4160),) * 30, (1, 6096)], 16, prefix=4096)
    assert [entry[3] for entry in work if entry[0] == 30] == [8] * 8
    assert {entry[3] for entry in work if entry[0] not in (-1, 30)} == {1}


def test_splits_of_long_contexts_start_first() -> None:
    """Wherever the long one stands; and the last block of a prompt before its first one."""
    order = divided([*((1, 64),) * 20, (1, 4000), *((1, 64),) * 20], 10)
    assert order[0][3] > 5
    assert {entry[0] for entry in order[: order[0][3]]} == {20}
    work = divided([(1, 20), (80, 80)], 0, block_tokens=16)
    assert [entry[:2] for entry in work if entry[0] >= 0] == [
        *([1, block] for block in (4, 3, 2, 1, 0)),
        [0, 0],
    ]
