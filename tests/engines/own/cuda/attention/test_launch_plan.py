"""Counts the programs and tiles of a decode's attention, as the Triton backend plans its launch.

The plan is made for a padded length, that of a captured graph. A program's share follows from its
own sequence's length, as in the kernel. The paper estimates of results.md are these counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")
from tokenmill_worker.engines.own.attention.base import AttentionMetadata, AttentionShape
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.cuda.attention.launch_plan import plan_launch
from tokenmill_worker.engines.own.cuda.attention.split_kernels import UNDIVIDED
from tokenmill_worker.engines.own.cuda.graph_inputs import padded_length

LLAMA = AttentionShape(32, 8, 128, 0.1)  # tiles of 32 keys, or of 16 for many programs
MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One call of attention.

    Args:
        programs: that have keys to read.
        most_tiles: of keys, in one program.
        idle: programs that return at once.
    """

    programs: int
    most_tiles: int
    idle: int


def work_of_decode(
    shape: AttentionShape, contexts: Sequence[int], padded_length: int, num_multiprocessors: int
) -> AttentionWork:
    """Return the work of a decode in 16 bits; `contexts` has the tokens of each sequence."""
    batch = len(contexts)
    empty = torch.empty(batch)
    metadata = AttentionMetadata(empty, empty, empty, empty, 1, padded_length, 16, None)
    launch = plan_launch(
        shape, metadata, batch,
        element_size=2, num_multiprocessors=num_multiprocessors, has_warp_groups=True,
        is_exact=False,
    )  # fmt: skip
    tiles = [-(-context // launch.tile_keys) for context in contexts]
    share = UNDIVIDED.value
    if launch.is_split:
        share = max(-(-sum(tiles) // (launch.num_programs - batch)), launch.least_tiles)
    splits = [-(-count // share) for count in tiles]
    most = max(-(-count // parts) for count, parts in zip(tiles, splits, strict=True))
    heads, used = shape.num_kv_heads, sum(splits)
    return AttentionWork(used * heads, most, (launch.num_programs - used) * heads)


@pytest.mark.parametrize(
    ("batch", "context", "expected"),
    [
        (1, 512, AttentionWork(64, 2, 208)),  # a program takes 64 keys at least
        (1, 16_000, AttentionWork(256, 16, 16)),
        (4, 1024, AttentionWork(256, 4, 40)),
        (8, 1024, AttentionWork(256, 8, 72)),
        (32, 1024, AttentionWork(256, 16, 0)),  # short contexts of a full device: no splits
        (256, 1024, AttentionWork(2048, 64, 0)),  # many programs: of one warp, 16 keys a tile
        (32, 4096, AttentionWork(512, 64, 256)),
        (256, 4096, AttentionWork(2048, 128, 528)),  # even contexts that fill the device stay whole
    ],
)
def test_a_decode_fills_the_device(batch: int, context: int, expected: AttentionWork) -> None:
    length = padded_length(context, EngineConfig(model="none"), 16_384)
    assert work_of_decode(LLAMA, (context,) * batch, length, MULTIPROCESSORS) == expected


def test_shorter_contexts_have_fewer_programs() -> None:
    """One long sequence among 127 short ones: no program has much more to do than a short one's."""
    work = work_of_decode(LLAMA, (16_000, *(512,) * 127), 16_384, MULTIPROCESSORS)
    assert work == AttentionWork(8 * (13 + 127), 39, 432)
