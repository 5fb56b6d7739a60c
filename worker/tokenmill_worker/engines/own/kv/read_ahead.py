"""Reads the blocks of a request's prompt from the disk into the host pool, before it is scheduled.

A thread searches how far the files continue what device and host have; the engine's thread takes
host blocks for them; threads read them. The scheduler then finds them in the host pool, as evicted
blocks. A disk that is slow costs a few requests a bounded wait, and then what a miss costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.kv.block_files import BlockFiles
from tokenmill_worker.engines.own.kv.disk_tier import DiskTier
from tokenmill_worker.engines.own.kv.host_tier import HostTier
from tokenmill_worker.engines.own.kv.manager import KVManager
from tokenmill_worker.engines.own.kv.prefix_cache import first_visible_block, longest_hit
from tokenmill_worker.engines.own.sequence import Sequence

LEAST_TOKENS: Final = 64  # a shorter rest is computed sooner than it is searched and read
STALL_S: Final = 2.0  # a disk that gives no block for so long hangs
READ_WAIT_S: Final = 10.0  # any disk that is worth a cache reads 8,000 tokens sooner
PAUSE_S: Final = 60.0  # a disk that was slower is not asked for so long: few requests wait for it


@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks that one prompt could take from the cache."""

    limit: int  # tokens
    keys: list[list[bytes]]  # by group, of all blocks up to `limit`
    present: frozenset[bytes]  # those on device or host
    windows: list[Window | None]
    block_sizes: list[int]

    def missing(self, files: BlockFiles) -> tuple[list[bytes], int]:
        """Return the keys to be read, the first of the prompt first, and how many blocks of the
        first group are nowhere.
        """
        known: dict[bytes, bool] = {}

        def has(key: bytes) -> bool:
            if key not in known:
                known[key] = key in self.present or files.has(key)
            return known[key]

        found = longest_hit(self.limit, self.keys, has, self.windows, self.block_sizes)
        wanted = sorted(
            (index * size, group, own[index])
            for group, (own, window, size) in enumerate(
                zip(self.keys, self.windows, self.block_sizes, strict=True)
            )
            for index in range(first_visible_block(found, window, size), found // size)
            if own[index] not in self.present
        )
        return [key for _, _, key in wanted], (self.limit - found) // self.block_sizes[0]


class ReadAhead:
    """One request's reads. Only the engine's thread uses it."""

    def __init__(self, disk: DiskTier, tier: HostTier, chains: list[Chain]) -> None:
        self._disk = disk
        self._tier = tier
        self._num_open = len(chains)  # searches and reads
        self._give_up_at = disk.clock() + READ_WAIT_S
        self._stalls_at = disk.clock() + STALL_S
        for chain in chains:
            tier.touch(key for own in chain.keys for key in own)
            disk.search(lambda chain=chain: chain.missing(disk.files), self._searched)  # type: ignore[misc]

    def has_ended(self) -> bool:
        """Return whether the request waits for no read any more; give up when the time is over."""
        if self._num_open and self._disk.clock() >= min(self._give_up_at, self._stalls_at):
            self._disk.files.count_failure("slow")
            self._disk.ask_again_at = self._disk.clock() + PAUSE_S
            self._num_open = 0
        return not self._num_open

    def _searched(self, found: tuple[list[bytes], int] | None) -> None:
        wanted, num_missed = found or ([], 0)
        self._disk.num_missed += num_missed
        self._stalls_at = self._disk.clock() + STALL_S
        if not self.has_ended():
            self._num_open += self._tier.read(wanted, self._was_read) - 1

    def _was_read(self) -> None:
        self._num_open = max(0, self._num_open - 1)
        self._stalls_at = self._disk.clock() + STALL_S


def read_ahead(kv: KVManager, sequences: Iterable[Sequence]) -> ReadAhead | None:
    """Begin to read what these sequences, of one request, can take from the disk; return None where
    that is nothing, or too little.
    """
    disk = kv.tier.disk
    if disk is None or not disk.is_current or disk.clock() < disk.ask_again_at:
        return None
    chains: dict[bytes, Chain] = {}
    for sequence in sequences:
        hashes = kv.hasher.extend(sequence)
        limit, sizes = sequence.num_skippable, kv.block_sizes
        if hashes and hashes[-1] not in chains:
            keys = [kv.keys(sequence, group, 0, limit // size) for group, size in enumerate(sizes)]
            present = frozenset(key for own in keys for key in own if kv.is_present(key))
            here = longest_hit(limit, keys, present.__contains__, kv.windows, sizes)
            if limit - here >= LEAST_TOKENS:
                chains[hashes[-1]] = Chain(limit, keys, present, kv.windows, sizes)
    return ReadAhead(disk, kv.tier, [*chains.values()]) if chains else None
