"""Counts the programs and tiles of a decode's attention, as the Triton backend plans its launch.

The plan is made for a padded length, that of a captured graph. A program's share follows from its
own sequence's length, as in the kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmill_worker.engine.attention.base import AttentionMetadata, AttentionShape
from tokenmill_worker.engine.cuda.attention.launch_plan import plan_launch


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
