"""Finds the blocks that many sequences of a decode begin with, where reading them once pays.

A device reads blocks that several sequences share once for each of them, mostly from its L2. With
a launch of its own a common prefix is read once for all. That launch takes longer than it saves
where few sequences, or few tokens, are shared. The limits here follow from times on an H100
(ops/benchmarks/history.md, Devices). Plain numpy.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill_worker.engines.own.config.cache import LayerGroup

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]  # [sequences, blocks]

LEAST_SEQS = 8  # the fewest that were measured: 46 µs a layer became 40
LEAST_TOKENS = 512  # two parts of 256, the fewest that attention divides among programs
# What a launch must save each layer of reading: with 117 to 130 MB it gained −1 to 6 µs of 50.
LEAST_BYTES = 128 << 20


class FoundPrefix(NamedTuple):
    """A common prefix on the host; `attention.CommonPrefix` says what the arrays are."""

    lens: Ints
    leader: int  # a sequence that begins with it
    bounds: Ints


def least_saved_tokens(groups: Seq[LayerGroup], element_size: int) -> list[int | None]:
    """Return how many tokens must not be read again for a launch of its own to pay, by layer group;
    None for groups with a window, which have no common prefix for long.
    """
    return [
        -(-LEAST_BYTES // (2 * group.num_kv_heads * group.head_dim * element_size))
        if group.window is None
        else None
        for group in groups
    ]


def find_prefix(table: Table, ends: Ints, block_size: int, least_saved: int) -> FoundPrefix | None:
    """Return the prefix whose common reading saves most tokens, at least `least_saved`; or None.

    It is a part of one sequence, the first of those that begin alike.

    Args:
        table: the sequences' block ids; entries behind a sequence's own blocks may be anything.
        ends: the tokens of each sequence with this step's.
        least_saved: at least 1.
    """
    count, first = len(ends), -(-LEAST_TOKENS // block_size)
    if count < LEAST_SEQS or first > table.shape[1]:
        return None
    column = table[:, first - 1]
    # If most sequences begin alike, the middle one of the sorted ids is theirs.
    is_alike = column == np.sort(column)[count // 2]
    if is_alike.sum() < LEAST_SEQS:
        return None
    leader = int(is_alike.argmax())
    differs = table != table[leader]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), table.shape[1])
    common = np.minimum(common, (ends - 1) // block_size)
    lengths = np.sort(np.where(common < first, 0, common))[::-1]
    saved = lengths * np.arange(count) * block_size  # by the first 1, 2, 3, … of these sequences
    best = LEAST_SEQS - 1 + int(saved[LEAST_SEQS - 1 :].argmax())
    if saved[best] < least_saved:
        return None
    tokens = int(lengths[best]) * block_size
    lens = np.where(common * block_size >= tokens, tokens, 0)
    return FoundPrefix(lens, leader, np.array([0, count, tokens + count]))
