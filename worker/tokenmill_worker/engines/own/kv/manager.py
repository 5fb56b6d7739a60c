"""Block tables of sequences in every layer group: allocation, growth, sharing, offload, release.

All groups take blocks from one pool; a block belongs to one group of one or more sequences at a
time. Blocks are taken for all groups or for none. The hashes of a prompt's full blocks are reserved
in the prefix cache when the blocks are allocated, and committed when the step that fills them has
succeeded. Generated blocks get their hashes when they are committed. Copies are planned in
`tier.copies`; the scheduler decides when to admit or preempt.

    a table:   NULL NULL NULL │ shared, full │ own, full (hashed) │ own, partial │ own, still empty
               left the window   refs > 1                          0 ≤ fill < block_size
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from tokenmill_worker.engines.own.config.cache import CacheConfig, most_blocks
from tokenmill_worker.engines.own.kv.block_pool import BlockPool
from tokenmill_worker.engines.own.kv.disk_tier import DiskTier
from tokenmill_worker.engines.own.kv.host_tier import HostTier
from tokenmill_worker.engines.own.kv.prefix_cache import (
    BlockHasher,
    CachedPrefix,
    deepest_visible,
    first_visible_block,
    longest_prefix,
)
from tokenmill_worker.engines.own.sequence import NULL_BLOCK, Sequence


class KVManager:
    """One pool of device blocks and one of host blocks, for all layer groups.

    `max_chunk` is the largest number of tokens of one sequence in one step.
    """

    def __init__(
        self,
        cache: CacheConfig,
        *,
        model_key: str,
        max_chunk: int,
        safety_margin: float,
        has_state: Callable[[bytes], bool] | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        self.block_size = cache.block_size  # of hashed blocks; those of a group are its multiples
        self.block_sizes = cache.block_sizes
        self.windows = [group.window for group in cache.groups]
        self.prefix_cache = cache.prefix_cache
        tier = self.tier = HostTier(cache.num_host_blocks, disk)
        on_evict = tier.keep_evicted if self.prefix_cache and tier.exists else None
        self.pool = BlockPool(cache.num_blocks, on_evict, None if disk is None else tier.save)
        self.hasher = BlockHasher(cache.block_size, model_key)
        # in flight or being planned; a reserved block whose owner last ran before it has stalled
        self.oldest_step = 0
        # whether recurrent states after the block with this hash are kept; None: there are none
        self.has_state = has_state
        self.margin = int(safety_margin * self.pool.num_usable)
        # tokens of a step that fit a table with a window; in a small pool they are a part of it
        self._chunk = min(max_chunk, self.pool.num_usable * self.block_size // 4)
        self._deferred: deque[tuple[int, int]] = deque()  # (step, block): released after the step
        self.tracks_every_token = any(window is not None for window in self.windows)

    # ── what would fit ──

    def max_tokens_alone(self, limit: int) -> int:
        """Return how many tokens (≤ limit) a sequence can compute when it runs alone."""
        usable = self.pool.num_usable
        return bisect_right(range(limit + 1), usable, key=lambda n: sum(self.targets(0, n))) - 1

    def reach(self, sequence: Sequence, end: int) -> int:
        """Return the position (≤ end) up to which `grow` would succeed now."""
        positions = range(sequence.num_slots, end + 1)
        free = self.pool.num_free
        return positions[bisect_right(positions, free, key=lambda p: self.lacks(sequence, p)) - 1]

    def lacks(self, sequence: Sequence, end: int) -> int:
        """Return how many blocks the sequence lacks for the positions below `end`."""
        tables = zip(sequence.block_tables, self.block_sizes, strict=True)
        return sum(max(0, -(-end // size) - len(table)) for table, size in tables)

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    # ── the prefix cache ──

    def keys(self, sequence: Sequence, group: int, start: int, stop: int) -> list[bytes]:
        """Return the keys of a group's blocks [start, stop), as far as they have hashes.

        A key is the hash of all tokens up to the block's end, and the group.
        """
        count = self.block_sizes[group] // self.block_size
        hashes = sequence.block_hashes[(start + 1) * count - 1 : stop * count : count]
        return [content + bytes((group,)) for content in hashes] if group else hashes

    def find(self, sequence: Sequence) -> CachedPrefix:
        """Find the longest usable prefix cached in all groups; see `Sequence.num_skippable`."""
        if not self.prefix_cache:
            return CachedPrefix(0)
        self.hasher.extend(sequence)
        limit, sizes = sequence.num_skippable, self.block_sizes
        keys = [self.keys(sequence, group, 0, limit // size) for group, size in enumerate(sizes)]
        hit = longest_prefix(limit, keys, self.is_present, self.windows, sizes, self.has_state)
        if not self.pool.reserved:
            return hit
        pending = deepest_visible(hit.num_tokens, keys, self.pool.is_reserved, self.windows, sizes)
        return replace(hit, pending=pending)

    def is_present(self, key: bytes) -> bool:
        """Return whether a block is on device or host, or filled by a step in flight."""
        block = self.pool.cached.get(key)
        if block is None:
            return key in self.tier.pool
        return block not in self.pool.reserved or self.is_pending(key)

    def is_pending(self, key: bytes) -> bool:
        """Return whether a step in flight still has to fill this block."""
        block = self.pool.cached.get(key)
        owner = None if block is None else self.pool.reserved.get(block)
        return owner is not None and owner.last_step >= self.oldest_step

    # ── taking blocks ──

    def allocate(self, sequence: Sequence, hit: CachedPrefix, headroom: int | None) -> bool:
        """Take the cached prefix and blocks for all known tokens, in all groups.

        Return False, and take nothing, if the blocks do not suffice.
        """
        prefixes = []
        for group, size in enumerate(self.block_sizes):
            num_blocks = hit.num_tokens // size
            first = min(self.first_visible(group, hit.num_tokens), num_blocks)
            entries = map(self._entry, self.keys(sequence, group, first, num_blocks))
            prefixes.append([NULL_BLOCK] * first + [*entries])
        if not self._fits(sequence, hit.num_tokens, prefixes, headroom):
            return False
        for host_block in (-1 - entry for entry in chain(*prefixes) if entry < 0):
            self.tier.pin(host_block)
        self._fill(sequence, hit.num_tokens, prefixes)
        sequence.checkpoints = hit.checkpoints
        return True

    def _entry(self, key: bytes) -> int:
        """Return the table entry of a cached block: the device block, or -1 - the host block."""
        block = self.pool.cached.get(key)
        if block is not None:
            return block
        host_block = self.tier.pool.find(key)
        if host_block is None:
            raise RuntimeError("the host lost a cached block between look-up and use")
        return -1 - host_block

    def restore(self, sequence: Sequence, headroom: int | None) -> bool:
        """Take device blocks for an offloaded sequence and plan the copies from the host.

        Full blocks that are still cached on the device are shared. Return False, and take nothing,
        if the blocks do not suffice.
        """
        committed, pool = sequence.num_committed_tokens, self.pool
        prefixes = []
        for group, host_table in enumerate(sequence.host_tables):
            keys = self.keys(sequence, group, 0, committed // self.block_sizes[group])
            prefix = []
            for index, host_block in enumerate(host_table):
                block = pool.cached.get(keys[index]) if index < len(keys) else None
                if host_block < 0:
                    block = NULL_BLOCK
                elif block is None or block in pool.reserved:
                    block = -1 - host_block
                prefix.append(block)
            prefixes.append(prefix)
        if not self._fits(sequence, committed, prefixes, headroom):
            return False
        self.tier.detach(sequence)
        self._fill(sequence, committed, prefixes)
        return True

    def grow(self, sequence: Sequence, end: int) -> bool:
        """Allocate blocks for every position below `end`, in all groups.

        Return False, and change nothing, if the blocks do not suffice.
        """
        if self.lacks(sequence, end) > self.pool.num_free:
            return False
        self._extend(sequence, [-(-end // size) for size in self.block_sizes])
        return True

    def _fits(
        self, sequence: Sequence, start: int, prefixes: list[list[int]], headroom: int | None
    ) -> bool:
        """Return whether the blocks suffice; change nothing.

        Cached blocks on the free list count as taken. The larger of the safety margin and
        `headroom` stays free; with `headroom` None, every block may be used.
        """
        left = self.pool.num_free - (0 if headroom is None else max(self.margin, headroom))
        for target, prefix in zip(self.targets(start, sequence.num_tokens), prefixes, strict=True):
            held = sum(1 for entry in prefix if entry >= 0)
            revived = sum(1 for entry in prefix if entry > 0 and not self.pool.refs[entry])
            left -= max(target, len(prefix)) - held + revived
        return left >= 0

    def _fill(self, sequence: Sequence, start: int, prefixes: list[list[int]]) -> None:
        """Build the tables: share the prefix, promote its host blocks, allocate the rest."""
        for block in (entry for entry in chain(*prefixes) if entry > 0):
            self.pool.share(block)  # all, before an allocation can evict one of them
        sequence.block_tables = []
        for group, prefix in enumerate(prefixes):
            table = [
                entry if entry >= 0 else self._promote(sequence, group, entry, index)
                for index, entry in enumerate(prefix)
            ]
            sequence.block_tables.append(table)
        self._extend(sequence, self.targets(start, sequence.num_tokens))

    def _promote(self, sequence: Sequence, group: int, entry: int, index: int) -> int:
        """Allocate a device block for a host block and plan the copy.

        A full block can be shared after the copy.
        """
        block = self.pool.allocate()
        copies = self.tier.copies
        committed = sequence.num_committed_tokens  # 0: the block comes from the prefix cache
        self.tier.copy_in(-1 - entry, block)
        for key in self.keys(sequence, group, index, index + 1):
            self.pool.reserve_hash(block, key, sequence)
            if not 0 < committed < (index + 1) * self.block_sizes[group]:
                copies.filled_blocks.append((block, sequence))
        if sequence not in copies.restored:
            copies.restored.append(sequence)
        return block

    def _extend(self, sequence: Sequence, targets: list[int]) -> None:
        tables = sequence.block_tables
        for group, (table, target) in enumerate(zip(tables, targets, strict=True)):
            for key in self.keys(sequence, group, len(table), target):
                table.append(self.pool.allocate())
                self.pool.reserve_hash(table[-1], key, sequence)
            table += [self.pool.allocate() for _ in range(len(table), target)]
        sequence.num_slots = min(
            len(table) * size for table, size in zip(tables, self.block_sizes, strict=True)
        )

    def targets(self, start: int, num_tokens: int) -> list[int]:
        """Return the length of each group's table for `num_tokens`, of which `start` are computed.

        A table with a window extends only as far as one step reaches.
        """
        found = []
        for group, (window, size) in enumerate(zip(self.windows, self.block_sizes, strict=True)):
            passed = self.first_visible(group, start)
            left = num_tokens - passed * size
            found.append(passed + most_blocks(window, self._chunk, size, left))
        return found

    def first_visible(self, group: int, position: int) -> int:
        return first_visible_block(position, self.windows[group], self.block_sizes[group])

    # ── progress ──

    def advance(self, sequence: Sequence, committed: int) -> None:
        """Commit positions below `committed`.

        Full blocks commit their hashes; blocks that left a window are freed.
        """
        before, sequence.num_committed_tokens = sequence.num_committed_tokens, committed
        num_full = committed // self.block_size
        if self.prefix_cache and num_full > before // self.block_size:
            if len(sequence.block_hashes) < num_full:
                self.hasher.extend(sequence)
            for group, size in enumerate(self.block_sizes):
                first, last = before // size, committed // size
                blocks = sequence.block_tables[group][first:last]
                for block, key in zip(blocks, self.keys(sequence, group, first, last), strict=True):
                    if block:
                        self.pool.commit_hash(block, key)
        if self.tracks_every_token:
            self._free_invisible(sequence, committed)

    def unregister(self, sequence: Sequence) -> None:
        """Drop the hashes of the sequence's reserved blocks after a failed step: nobody knows when
        they will be filled, so no sequence may wait for them.
        """
        for table, size in zip(sequence.block_tables, self.block_sizes, strict=True):
            for block in table[sequence.num_committed_tokens // size :]:
                if self.pool.reserved.get(block) is sequence:
                    self.pool.forget(block)

    def _free_invisible(self, sequence: Sequence, position: int) -> None:
        for group, table in enumerate(sequence.block_tables):
            index = min(self.first_visible(group, position), len(table)) - 1
            while index >= 0 and table[index]:
                self.pool.release(table[index])
                table[index] = NULL_BLOCK
                index -= 1

    # ── releasing ──

    def free(self, sequence: Sequence, in_flight: bool) -> None:
        """Release every block of the sequence, in all groups from its end to its start.

        With `in_flight`, blocks that a step in flight may still write are released only when that
        step is over.
        """
        blocks = [
            ((index + 1) * size, block)
            for table, size in zip(sequence.block_tables, self.block_sizes, strict=False)
            for index, block in enumerate(table)
            if block
        ]
        for end, block in sorted(blocks, reverse=True):
            if not in_flight or end <= sequence.num_committed_tokens:
                self.pool.release(block)
                continue
            if block in self.pool.reserved:
                self.pool.forget(block)
            self._deferred.append((sequence.last_step, block))
        sequence.block_tables = []
        sequence.num_slots = sequence.num_computed_tokens = sequence.num_committed_tokens = 0

    def offload(self, sequence: Sequence, in_flight: bool) -> bool:
        """Plan copies of the committed KV to the host and free the blocks.

        Return False, and change nothing, if the host has no room.
        """
        committed = sequence.num_committed_tokens
        counts = [-(-committed // size) for size in self.block_sizes]
        if not (self.tier.exists and committed and self.tier.offload(sequence, counts)):
            return False
        self.free(sequence, in_flight)
        sequence.num_computed_tokens = sequence.num_committed_tokens = committed
        return True

    # ── steps ──

    def release_deferred(self, oldest_in_flight: int | None) -> None:
        """Release blocks deferred by steps older than this one (None: nothing is in flight)."""
        deferred = self._deferred
        while deferred and (oldest_in_flight is None or deferred[0][0] < oldest_in_flight):
            self.pool.release(deferred.popleft()[1])

    def reset_prefix_cache(self) -> None:
        """Drop every hash, on device and host; running sequences keep their blocks."""
        self.hasher.generation += 1
        self.pool.forget_all()
        self.tier.forget_all()
