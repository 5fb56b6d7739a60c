"""Counts the blocks that a waiting sequence lacks, also if some running ones were preempted.

The count follows `KVManager`: all layer groups, shared blocks, blocks in the prefix cache. Nothing
is changed, so that no sequence is preempted in vain.
"""

from __future__ import annotations

from collections import Counter

from tokenmill_worker.engines.own.kv.manager import KVManager
from tokenmill_worker.engines.own.sequence import NULL_BLOCK, Sequence


class MissingBlocks:
    """Missing blocks for one waiting sequence.

    Its first `num_computed` tokens are in the prefix cache or on the host.
    """

    __slots__ = ("_gone", "_kv", "_missing", "_shared")

    def __init__(self, kv: KVManager, sequence: Sequence, num_computed: int) -> None:
        self._kv = kv
        self._gone: Counter[int] = Counter()  # block → how many preempted sequences hold it
        self._shared = _shared(kv, sequence, num_computed)
        passed = sum(
            min(kv.first_visible(group, num_computed), num_computed // size)
            for group, size in enumerate(kv.block_sizes)
        )
        in_use = sum(1 for block in self._shared if kv.pool.refs[block])
        needed = sum(kv.targets(num_computed, sequence.num_tokens)) - passed - in_use
        self._missing = needed - kv.pool.num_free

    def without(self, sequence: Sequence) -> None:
        """Count as if this running sequence were preempted too.

        Blocks shared with the waiting sequence stay in use and free nothing.
        """
        for table in sequence.block_tables:
            for block in table:
                if block == NULL_BLOCK or block in self._shared:
                    continue
                self._gone[block] += 1
                self._missing -= self._gone[block] == self._kv.pool.refs[block]

    def are_none(self, headroom: int | None) -> bool:
        """Return whether no blocks are missing.

        The larger of `headroom` and the safety margin must stay free; None: every block may be
        used.
        """
        to_keep = 0 if headroom is None else max(self._kv.margin, headroom)
        return self._missing + to_keep <= 0


def _shared(kv: KVManager, sequence: Sequence, num_computed: int) -> set[int]:
    """Return the device blocks that hold the computed tokens."""
    found = set()
    for group, size in enumerate(kv.block_sizes):
        first = kv.first_visible(group, num_computed)
        for key in kv.keys(sequence, group, first, num_computed // size):
            block = kv.pool.cached.get(key)
            if block is not None and block not in kv.pool.reserved:
                found.add(block)
    return found
