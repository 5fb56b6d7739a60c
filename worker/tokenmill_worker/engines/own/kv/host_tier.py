"""The host side of the KV cache: the blocks that a step copies out and in, and how it is undone.

The tier has a host pool behind the device pool. It allocates host blocks for preempted sequences,
keeps evicted prefix blocks by key, and collects the step's copies in `StepCopies`. Scheduler and
KVManager decide what is copied. Where there is a cache on disk, the tier also copies each block
that a step has filled, hands over what arrives on the host to be written, and takes what was read.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tokenmill_worker.engines.own.kv.block_pool import BlockPool
from tokenmill_worker.engines.own.kv.disk_tier import DiskTier
from tokenmill_worker.engines.own.kv.host_pool import HostPool
from tokenmill_worker.engines.own.plan import BlockCopy
from tokenmill_worker.engines.own.sequence import Sequence

# A step is lengthened by no more copies for the disk than this; a prefill on a CPU fills as many.
SAVED_AT_ONCE: Final = 32


@dataclass(slots=True)
class StepCopies:
    """The copies of one step: filled while it is planned, kept until it is committed or abandoned.

    - `kept`: keys of evicted prefix blocks that the step copies to the host, and of blocks that it
      copies for the disk; `num_saved` are these.
    - `pinned`: host blocks that the step reads or writes.
    - `host_sources`: host blocks of returning sequences, read for the last time.
    - `filled_blocks`: device blocks that the step fills, with their owners; their hashes are
      reserved until then.
    - `restored`: sequences with blocks that this step copies from the host.
    - `offloaded`: sequences whose blocks this step copies to the host.
    """

    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    num_saved: int = 0
    pinned: list[int] = field(default_factory=list)
    host_sources: list[int] = field(default_factory=list)
    filled_blocks: list[tuple[int, Sequence]] = field(default_factory=list)
    restored: list[Sequence] = field(default_factory=list)
    offloaded: list[Sequence] = field(default_factory=list)
    is_counted: bool = False  # its sequences' num_inflight include the tokens it samples


class HostTier:
    """The host pool (empty without offload), and the next step's copies."""

    def __init__(self, num_blocks: int, disk: DiskTier | None = None) -> None:
        self.disk = disk
        # key → the host block that is read from the disk, and whom to tell
        self.reading: dict[bytes, tuple[int, list[Callable[[], None]]]] = {}
        self._unsaved: dict[bytes, None] = {}  # keys of device blocks that the disk is to have
        self._num_saving = 0  # of steps in flight
        self.pool = HostPool(num_blocks)
        self.exists = num_blocks > 0
        self.copies = StepCopies()
        self.swapped_out = self.swapped_in = 0

    # ── second tier of the prefix cache ──

    def keep_evicted(self, key: bytes, block: int) -> None:
        """Plan a copy of an evicted device block to the host, if the host pool has room."""
        self._unsaved.pop(key, None)
        target = self.pool.keep(key)
        if target is not None:
            self._copy_out(block, target)
            self.copies.kept.append(key)
            self.pin(target)  # no other copy of the same step may use this host block

    # ── the disk ──

    def save(self, key: bytes, _block: int) -> None:
        """Let the disk have a block that a step has filled, soon, or when it is evicted."""
        if self.disk is not None and self.disk.is_current:
            self._unsaved[key] = None

    @property
    def has_saves(self) -> bool:
        """Return whether a step could copy blocks for the disk."""
        return bool(self._unsaved) and self._room_to_write > 0

    @property
    def has_unsaved(self) -> bool:
        """Return whether the disk is to have further blocks of the device."""
        return bool(self._unsaved)

    @property
    def _room_to_write(self) -> int:
        """The blocks that may be handed over now; half of the host pool serves reads."""
        if self.disk is None or not self.disk.is_current:
            return 0
        return self.pool.num_blocks // 2 - self.disk.num_unwritten - self._num_saving

    def plan_saves(self, device: BlockPool) -> None:
        """Plan copies to the host of blocks that the disk is to have."""
        room = min(self._room_to_write, SAVED_AT_ONCE)
        while self._unsaved and room > 0:
            key = next(iter(self._unsaved))
            block = device.cached.get(key)
            num_kept = len(self.copies.kept)
            if block is None or block in device.reserved:
                del self._unsaved[key]
                continue
            self.keep_evicted(key, block)
            num_saved = len(self.copies.kept) - num_kept
            self.copies.num_saved += num_saved
            self._num_saving += num_saved
            room -= num_saved

    def _write(self, keys: list[bytes], device: BlockPool) -> None:
        """Hand over blocks that a step has copied to the host."""
        found: list[tuple[bytes, int]] = []
        for key in keys:
            block = self.pool.find(key)
            if block is None or self.disk is None or not self.disk.is_current:
                continue
            if self._room_to_write > len(found):
                self.pool.pin(block)
                found.append((key, block))
            else:
                self.disk.files.count_failure("busy")
        if self.disk is not None and found:
            self.disk.write(found, partial(self._was_written, device))

    def _was_written(self, device: BlockPool, key: bytes, block: int) -> None:
        """Free the host block if the device still has the content."""
        if key in device.cached and self.pool.find(key) == block:
            self.pool.forget(key)
        self.pool.unpin(block)

    def read(self, keys: Iterable[bytes], then: Callable[[], None]) -> int:
        """Begin to read blocks from the disk, as many as have room; return their number.

        `then` is called for each when it has been read, or could not be.
        """
        started, count = [], 0
        for key in keys:
            if key in self.reading:
                self.reading[key][1].append(then)
            elif key in self.pool:
                continue
            else:
                block = self.pool.take()
                if block is None:
                    break
                self.reading[key] = block, [then]
                started.append((key, block))
            count += 1
        if self.disk is not None and started:
            self.disk.read(started, self._was_read)
        return count

    def _was_read(self, key: bytes, is_valid: bool | None) -> None:
        block, waiting = self.reading.pop(key)
        if is_valid and self.disk is not None and self.disk.is_current:
            self.disk.num_read += 1
            self.pool.adopt(key, block)
        else:
            self.pool.give_back(block)
        for then in waiting:
            then()

    def forget_all(self) -> None:
        """Drop what is kept by hash. The disk has blocks of other weights from now on: leave it."""
        if self.disk is not None:
            self.disk.is_current = False
        self._unsaved.clear()
        self.pool.forget_all()

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.pool.touch(key)

    def pin(self, host_block: int) -> None:
        self.pool.pin(host_block)
        self.copies.pinned.append(host_block)

    def copy_in(self, host_block: int, block: int) -> None:
        self.copies.swap_in.append(BlockCopy(host_block, block))
        self.swapped_in += 1

    def _copy_out(self, block: int, host_block: int) -> None:
        self.copies.swap_out.append(BlockCopy(block, host_block))
        self.swapped_out += 1

    # ── preempted sequences ──

    def offload(self, sequence: Sequence, num_blocks: list[int]) -> bool:
        """Plan copies of the first `num_blocks` blocks of the sequence's tables to the host.

        Entries that left a sliding window are skipped. Return False if there is no room.
        """
        tables = [
            table[:count] for table, count in zip(sequence.block_tables, num_blocks, strict=True)
        ]
        if sum(1 for table in tables for block in table if block) > self.pool.num_free:
            return False
        for table in tables:
            host_table = []
            for block in table:
                target = self.pool.take() if block else None
                host_table.append(-1 if target is None else target)
                if target is not None:
                    self._copy_out(block, target)
            sequence.host_tables.append(host_table)
        self.copies.offloaded.append(sequence)
        return True

    def detach(self, sequence: Sequence) -> None:
        """Detach the host blocks of a sequence that returns to the device.

        They are free once the step that reads them is over.
        """
        self.copies.host_sources += _held(sequence)
        sequence.host_tables = []

    def free(self, sequence: Sequence) -> None:
        for block in _held(sequence):
            self.pool.give_back(block)
        sequence.host_tables = []

    # ── steps ──

    def take_copies(self) -> StepCopies:
        """Return the copies of the step just planned; pass them to `commit` or `undo` later."""
        copies, self.copies = self.copies, StepCopies()
        return copies

    def commit(self, copies: StepCopies, pool: BlockPool) -> None:
        """Finish the copies of a step that succeeded: the hashes of the filled blocks count now."""
        for block, owner in copies.filled_blocks:
            if pool.reserved.get(block) is owner:
                del pool.reserved[block]
        self._num_saving -= copies.num_saved
        if self.disk is not None:
            self._write(copies.kept, pool)
        self._release_host_blocks(copies)

    def undo(self, copies: StepCopies) -> None:
        """Undo the copies of a step that failed: drop the hashes of blocks that it did not copy."""
        self._num_saving -= copies.num_saved
        for key in copies.kept:
            self.pool.forget(key)
        self._release_host_blocks(copies)

    def _release_host_blocks(self, copies: StepCopies) -> None:
        for block in copies.pinned:
            self.pool.unpin(block)
        for block in copies.host_sources:
            self.pool.give_back(block)


def _held(sequence: Sequence) -> list[int]:
    """Return the host blocks of a preempted sequence."""
    return [block for table in sequence.host_tables for block in table if block >= 0]
