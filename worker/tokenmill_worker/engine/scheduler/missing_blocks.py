"""Counts the blocks that a waiting sequence lacks, also if some running ones were preempted.

The count follows `KVManager`: all layer groups, shared blocks, blocks in the prefix cache. Nothing
is changed, so that no sequence is preempted in vain.
"""

from __future__ import annotations

from collections import Counter

from tokenmill_worker.engine.kv.manager import KVManager
from tokenmill_worker.engine.sequence import NULL_BLOCK, Sequence


class MissingBlocks:
    """Missing blocks per layer group for one waiting sequence.

    Its first `num_computed` tokens are in the prefix cache or on the host.
    """

    __slots__ = ("_gone", "_kv", "_missing", "_shared")

    def __init__(self, kv: KVManager, sequence: Sequence, num_computed: int) -> None:
        groups = range(len(kv.pools))
        self._kv = kv
        # block → how many preempted sequences hold it
        self._gone: list[Counter[int]] = [Counter() for _ in groups]
        self._shared = [_shared(kv, group, sequence, num_computed) for group in groups]
        self._missing = [self._lacks(group, sequence, num_computed) for group in groups]

    def _lacks(self, group: int, sequence: Sequence, num_computed: int) -> int:
        kv, pool = self._kv, self._kv.pools[group]
        passed = min(kv.first_visible(group, num_computed), num_computed // kv.block_size)
        in_use = sum(1 for block in self._shared[group] if pool.refs[block])
        return kv.target(group, num_computed, sequence.num_tokens) - passed - in_use - pool.num_free

    def without(self, sequence: Sequence) -> None:
        """Count as if this running sequence were preempted too.

        Blocks shared with the waiting sequence stay in use and free nothing.
        """
        for group, (pool, table) in enumerate(
            zip(self._kv.pools, sequence.block_tables, strict=True)
        ):
            gone, shared = self._gone[group], self._shared[group]
            for block in table:
                if block == NULL_BLOCK or block in shared:
                    continue
                gone[block] += 1
                self._missing[group] -= gone[block] == pool.refs[block]

    def are_none(self, headroom: int | None) -> bool:
        """Return whether no blocks are missing in any group.

        The larger of `headroom` and the safety margin must stay free; None: every block may be
        used.
        """
        return all(
            missing + (0 if headroom is None else max(margin, headroom)) <= 0
            for missing, margin in zip(self._missing, self._kv.margins, strict=True)
        )


def _shared(kv: KVManager, group: int, sequence: Sequence, num_computed: int) -> set[int]:
    first, end = kv.first_visible(group, num_computed), num_computed // kv.block_size
    pool = kv.pools[group]
    blocks = (pool.cached.get(content) for content in sequence.block_hashes[first:end])
    return {block for block in blocks if block is not None and block not in pool.reserved}
