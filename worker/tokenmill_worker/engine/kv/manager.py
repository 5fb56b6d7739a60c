"""Block tables of sequences in every layer group: allocation, growth, sharing, offload, release.

Blocks are taken in all groups or in none. The hashes of a prompt's full blocks are reserved in the
prefix cache when the blocks are allocated, and committed when the step that fills them has
succeeded. Generated blocks get their hashes when they are committed. Copies are planned in
`tier.copies`; the scheduler decides when to admit or preempt.

    a table:   NULL NULL NULL │ shared, full │ own, full (hashed) │ own, partial │ own, still empty
               left the window   refs > 1                          0 ≤ fill < block_size
"""

from collections import deque

from tokenmill_worker.engine.cache_config import CacheConfig
from tokenmill_worker.engine.kv.block_pool import BlockPool
from tokenmill_worker.engine.kv.host_tier import HostTier
from tokenmill_worker.engine.kv.prefix_cache import (
    BlockHasher,
    CachedPrefix,
    first_visible_block,
    longest_hit,
    present_in,
)
from tokenmill_worker.engine.sequence import NULL_BLOCK, Sequence


class KVManager:
    """One device block pool and one host pool per layer group.

    `max_chunk` is the largest number of tokens of one sequence in one step.
    """

    def __init__(
        self, cache: CacheConfig, *, model_key: str, max_chunk: int, safety_margin: float
    ) -> None:
        self.block_size = cache.block_size
        self.windows = [group.window for group in cache.groups]
        self.prefix_cache = cache.prefix_cache
        self.tier = HostTier(cache.num_host_blocks)
        tiers = self.prefix_cache and self.tier.exists
        self.pools = [
            BlockPool(count, self.tier.keeper_of_evicted(group) if tiers else None)
            for group, count in enumerate(cache.num_blocks)
        ]
        self.hasher = BlockHasher(cache.block_size, model_key)
        # in flight or being planned; a reserved block whose owner last ran before it has stalled
        self.oldest_step = 0
        self.margins = [int(safety_margin * pool.num_usable) for pool in self.pools]
        # (step, group, block): released when the step is over
        self._deferred: deque[tuple[int, int, int]] = deque()
        # A sliding group's table is filled at most this far ahead of what the next query sees.
        self._ahead = [
            None
            if window is None
            else min(-(-(window - 1 + max_chunk) // self.block_size) + 2, pool.num_usable)
            for window, pool in zip(self.windows, self.pools, strict=True)
        ]
        self.tracks_every_token = any(window is not None for window in self.windows)

    # ── what would fit ──

    def max_tokens_alone(self, limit: int) -> int:
        """Return how many tokens (≤ limit) a sequence can compute when it runs alone."""
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is None or pool.num_usable < -(-window // self.block_size) + 2:
                limit = min(limit, pool.num_usable * self.block_size)
        return limit

    def reach(self, sequence: Sequence) -> int:
        """Return the position up to which `grow` would succeed now."""
        tables = zip(self.pools, sequence.block_tables, strict=True)
        return min(len(table) + pool.num_free for pool, table in tables) * self.block_size

    @property
    def num_free(self) -> int:
        return min(pool.num_free for pool in self.pools)

    @property
    def num_frees(self) -> int:
        return sum(pool.frees for pool in self.pools)

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    # ── the prefix cache ──

    def find(self, sequence: Sequence) -> CachedPrefix:
        """Find the longest usable prefix cached in all groups; see `Sequence.num_skippable`."""
        if not self.prefix_cache:
            return CachedPrefix(0)
        hashes = self.hasher.extend(sequence)
        limit = min(sequence.num_skippable // self.block_size, len(hashes))
        tiers = zip(self.pools, self.tier.pools, strict=True)
        present = [present_in(pool, host, self.oldest_step) for pool, host in tiers]
        found = longest_hit(hashes, limit, present, self.windows, self.block_size)
        return CachedPrefix(found * self.block_size, self._pending(hashes, found))

    def is_pending(self, awaited: tuple[int, bytes]) -> bool:
        """Return whether a step in flight still has to fill this block (group, hash)."""
        pool = self.pools[awaited[0]]
        block = pool.cached.get(awaited[1])
        owner = None if block is None else pool.reserved.get(block)
        return owner is not None and owner.last_step >= self.oldest_step

    def _pending(self, hashes: list[bytes], found: int) -> tuple[int, bytes] | None:
        for index in range(found - 1, -1, -1):
            for group, pool in enumerate(self.pools):
                if not pool.reserved or index < self.first_visible(group, found * self.block_size):
                    continue
                if pool.cached.get(hashes[index]) in pool.reserved:
                    return group, hashes[index]
        return None

    # ── taking blocks ──

    def allocate(self, sequence: Sequence, hit: CachedPrefix, headroom: int | None) -> bool:
        """Take the cached prefix and blocks for all known tokens, in all groups.

        Return False, and take nothing, if the blocks of one group do not suffice.
        """
        num_blocks = hit.num_tokens // self.block_size
        prefixes = []
        for group in range(len(self.pools)):
            first = min(self.first_visible(group, hit.num_tokens), num_blocks)
            contents = sequence.block_hashes[first:num_blocks]
            entries = [self._entry(group, content) for content in contents]
            prefixes.append([NULL_BLOCK] * first + entries)
        if not self._fits(sequence, hit.num_tokens, prefixes, headroom):
            return False
        for group, prefix in enumerate(prefixes):
            for entry in prefix:
                if entry < 0:
                    self.tier.pin(group, -1 - entry)
        self._fill(sequence, prefixes)
        return True

    def _entry(self, group: int, content: bytes) -> int:
        """Return the table entry of a cached block: the device block, or -1 - the host block."""
        block = self.pools[group].cached.get(content)
        if block is not None:
            return block
        host_block = self.tier.pools[group].find(content)
        if host_block is None:
            raise RuntimeError(f"group {group} lost a cached block between look-up and use")
        return -1 - host_block

    def restore(self, sequence: Sequence, headroom: int | None) -> bool:
        """Take device blocks for an offloaded sequence and plan the copies from the host.

        Full blocks that are still cached on the device are shared. Return False, and take nothing,
        if the blocks do not suffice.
        """
        committed = sequence.num_committed_tokens
        hashes = sequence.block_hashes[: committed // self.block_size]
        prefixes = []
        for pool, host_table in zip(self.pools, sequence.host_tables, strict=True):
            prefix = []
            for index, host_block in enumerate(host_table):
                block = pool.cached.get(hashes[index]) if index < len(hashes) else None
                if host_block < 0:
                    block = NULL_BLOCK
                elif block is None or block in pool.reserved:
                    block = -1 - host_block
                prefix.append(block)
            prefixes.append(prefix)
        if not self._fits(sequence, committed, prefixes, headroom):
            return False
        self.tier.detach(sequence)
        self._fill(sequence, prefixes)
        return True

    def grow(self, sequence: Sequence, end: int) -> bool:
        """Allocate blocks for every position below `end`, in all groups.

        Return False, and change nothing, if the blocks of one group do not suffice.
        """
        target = -(-end // self.block_size)
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            if target - len(table) > pool.num_free:
                return False
        self._extend(sequence, [target] * len(self.pools))
        return True

    def _fits(
        self, sequence: Sequence, start: int, prefixes: list[list[int]], headroom: int | None
    ) -> bool:
        """Return whether the blocks suffice; change nothing.

        Cached blocks on the free list count as taken. The larger of the safety margin and
        `headroom` stays free; with `headroom` None, every block may be used.
        """
        for group, (pool, prefix) in enumerate(zip(self.pools, prefixes, strict=True)):
            held = sum(1 for entry in prefix if entry >= 0)
            revived = sum(1 for entry in prefix if entry > 0 and not pool.refs[entry])
            need = max(self.target(group, start, sequence.num_tokens), len(prefix)) - held + revived
            to_keep = 0 if headroom is None else max(self.margins[group], headroom)
            if pool.num_free - need < to_keep:
                return False
        return True

    def _fill(self, sequence: Sequence, prefixes: list[list[int]]) -> None:
        """Build the tables: share the prefix, promote its host blocks, allocate the rest."""
        start = len(prefixes[0]) * self.block_size
        for pool, prefix in zip(self.pools, prefixes, strict=True):
            for entry in prefix:  # all, before an allocation can evict one of them
                if entry > 0:
                    pool.share(entry)
        sequence.block_tables = []
        for group, prefix in enumerate(prefixes):
            table = [
                entry if entry >= 0 else self._promote(sequence, group, entry, index)
                for index, entry in enumerate(prefix)
            ]
            sequence.block_tables.append(table)
        groups = range(len(self.pools))
        self._extend(sequence, [self.target(g, start, sequence.num_tokens) for g in groups])

    def _promote(self, sequence: Sequence, group: int, entry: int, index: int) -> int:
        """Allocate a device block for a host block and plan the copy.

        A full block can be shared after the copy.
        """
        block = self.pools[group].allocate()
        copies = self.tier.copies
        committed = sequence.num_committed_tokens  # 0: the block comes from the prefix cache
        self.tier.copy_in(group, -1 - entry, block)
        if index < len(sequence.block_hashes):
            self.pools[group].reserve_hash(block, sequence.block_hashes[index], sequence)
            if not 0 < committed < (index + 1) * self.block_size:
                copies.filled_blocks.append((group, block, sequence))
        if sequence not in copies.restored:
            copies.restored.append(sequence)
        return block

    def _extend(self, sequence: Sequence, targets: list[int]) -> None:
        hashes = sequence.block_hashes
        for pool, table, target in zip(self.pools, sequence.block_tables, targets, strict=True):
            for index in range(len(table), target):
                block = pool.allocate()
                table.append(block)
                if index < len(hashes):
                    pool.reserve_hash(block, hashes[index], sequence)
        sequence.num_slots = min(map(len, sequence.block_tables)) * self.block_size

    def target(self, group: int, start: int, num_tokens: int) -> int:
        """Return the table length for `num_tokens`.

        A sliding table extends only as far as one step reaches.
        """
        blocks, ahead = -(-num_tokens // self.block_size), self._ahead[group]
        return blocks if ahead is None else min(blocks, self.first_visible(group, start) + ahead)

    def first_visible(self, group: int, position: int) -> int:
        return first_visible_block(position, self.windows[group], self.block_size)

    # ── progress ──

    def advance(self, sequence: Sequence, committed: int) -> None:
        """Commit positions below `committed`.

        Full blocks commit their hashes; blocks that left a window are freed.
        """
        first, last = sequence.num_committed_tokens // self.block_size, committed // self.block_size
        sequence.num_committed_tokens = committed
        if self.prefix_cache and last > first:
            hashes = sequence.block_hashes
            if len(hashes) < last:
                self.hasher.extend(sequence)
            for pool, table in zip(self.pools, sequence.block_tables, strict=True):
                for index in range(first, last):
                    if table[index]:
                        pool.commit_hash(table[index], hashes[index])
        if self.tracks_every_token:
            self._free_invisible(sequence, committed)

    def unregister(self, sequence: Sequence) -> None:
        """Drop the hashes of the sequence's reserved blocks.

        Called after a failed step: nobody knows when the blocks will be filled, so no sequence may
        wait for them.
        """
        first = sequence.num_committed_tokens // self.block_size
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            for block in table[first:]:
                if pool.reserved.get(block) is sequence:
                    pool.forget(block)

    def _free_invisible(self, sequence: Sequence, position: int) -> None:
        for group, (pool, table) in enumerate(zip(self.pools, sequence.block_tables, strict=True)):
            index = min(self.first_visible(group, position), len(table)) - 1
            while index >= 0 and table[index]:
                pool.release(table[index])
                table[index] = NULL_BLOCK
                index -= 1

    # ── releasing ──

    def free(self, sequence: Sequence, in_flight: bool) -> None:
        """Release every block of the sequence.

        With `in_flight`, blocks that a step in flight may still write are released only when that
        step is over.
        """
        unsafe = sequence.num_committed_tokens // self.block_size if in_flight else None
        for group, (pool, table) in enumerate(zip(self.pools, sequence.block_tables, strict=False)):
            for index in range(len(table) - 1, -1, -1):
                block = table[index]
                if not block:
                    continue
                if unsafe is None or index < unsafe:
                    pool.release(block)
                    continue
                if block in pool.reserved:
                    pool.forget(block)
                self._deferred.append((sequence.last_step, group, block))
        sequence.block_tables = []
        sequence.num_slots = sequence.num_computed_tokens = sequence.num_committed_tokens = 0

    def offload(self, sequence: Sequence, in_flight: bool) -> bool:
        """Plan copies of the committed KV to the host and free the blocks.

        Return False, and change nothing, if the host has no room.
        """
        committed = sequence.num_committed_tokens
        if not self.tier.exists or not committed:
            return False
        if not self.tier.offload(sequence, -(-committed // self.block_size)):
            return False
        self.free(sequence, in_flight)
        sequence.num_computed_tokens = sequence.num_committed_tokens = committed
        return True

    # ── steps ──

    def release_deferred(self, oldest_in_flight: int | None) -> None:
        """Release blocks deferred by steps older than this one (None: nothing is in flight)."""
        deferred = self._deferred
        while deferred and (oldest_in_flight is None or deferred[0][0] < oldest_in_flight):
            _, group, block = deferred.popleft()
            self.pools[group].release(block)

    def reset_prefix_cache(self) -> None:
        """Drop every hash, on device and host; running sequences keep their blocks."""
        self.hasher.generation += 1
        for pool, host in zip(self.pools, self.tier.pools, strict=True):
            pool.forget_all()
            host.forget_all()
