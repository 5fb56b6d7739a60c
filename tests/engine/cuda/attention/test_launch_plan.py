"""Counts the programs and tiles of a decode's attention, as the Triton backend plans its launch.

The plan is made for a padded length, that of a captured graph. A program's share follows from its
own sequence's length, as in the kernel. The paper estimates of results.md are these counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")
from tokenmill_worker.engine.attention.base import AttentionMetadata, AttentionShape
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.cuda.attention.launch_plan import plan_launch
from tokenmill_worker.engine.cuda.graph_inputs import padded_length

LLAMA = AttentionShape(32, 8, 128, 0.1)  # tiles of 64 keys
MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One call of attention.

    Args:
        programs: that have keys to read.
        most_tiles: of keys, in one program.
        idle: programs that return at once.
        launches: of kernels: one, and another that folds splits.
    """

    programs: int
    most_tiles: int
    idle: int
    launches: int


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
    used, most = 0, 0
    for context in contexts:
        tiles = -(-context // launch.tile_keys)
        share = max(-(-tiles // launch.num_splits), launch.least_tiles)
        used += -(-tiles // share)
        most = max(most, min(share, tiles))
    started = launch.num_programs * launch.num_splits
    heads, is_split = shape.num_kv_heads, launch.num_splits > 1
    return AttentionWork(used * heads, most, (started - used) * heads, 1 + is_split)


@pytest.mark.parametrize(
    ("batch", "context", "expected"),
    [
        (1, 512, AttentionWork(32, 2, 96, 2)),  # a program takes 128 keys at least
        (1, 16_000, AttentionWork(256, 8, 8, 2)),
        (4, 1024, AttentionWork(256, 2, 0, 2)),
        (8, 1024, AttentionWork(256, 4, 0, 2)),
        (32, 1024, AttentionWork(256, 16, 0, 1)),  # short contexts of a full device: no fold
        (256, 1024, AttentionWork(2048, 16, 0, 1)),
        (256, 4096, AttentionWork(4096, 32, 0, 2)),
    ],
)
def test_a_decode_fills_the_device(batch: int, context: int, expected: AttentionWork) -> None:
    length = padded_length(context, EngineConfig(model="none"), 16_384)
    assert work_of_decode(LLAMA, (context,) * batch, length, MULTIPROCESSORS) == expected


def test_shorter_contexts_have_fewer_programs() -> None:
    """One long sequence among 31 short ones: its programs read no more than 2,048 keys."""
    work = work_of_decode(LLAMA, (16_000, *(1000,) * 31), 16_384, MULTIPROCESSORS)
    assert work == AttentionWork(8 * (8 + 31), 32, 8 * 7 * 31, 2)
