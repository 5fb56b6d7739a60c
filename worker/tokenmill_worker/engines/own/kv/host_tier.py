"""The host side of the KV cache: the blocks that a step copies out and in, and how it is undone.

The tier has a host pool behind the device pool. It allocates host blocks for preempted sequences,
keeps evicted prefix blocks by key, and collects the step's copies in `StepCopies`. Scheduler and
KVManager decide what is copied.
"""

from dataclasses import dataclass, field

from tokenmill_worker.engines.own.kv.block_pool import BlockPool
from tokenmill_worker.engines.own.kv.host_pool import HostPool
from tokenmill_worker.engines.own.plan import BlockCopy
from tokenmill_worker.engines.own.sequence import Sequence


@dataclass(slots=True)
class StepCopies:
    """The copies of one step: filled while it is planned, kept until it is committed or abandoned.

    - `kept`: keys of evicted prefix blocks that the step copies to the host.
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
    pinned: list[int] = field(default_factory=list)
    host_sources: list[int] = field(default_factory=list)
    filled_blocks: list[tuple[int, Sequence]] = field(default_factory=list)
    restored: list[Sequence] = field(default_factory=list)
    offloaded: list[Sequence] = field(default_factory=list)
    is_counted: bool = False  # its sequences' num_inflight include the tokens it samples


class HostTier:
    """The host pool (empty without offload), and the next step's copies."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = HostPool(num_blocks)
        self.exists = num_blocks > 0
        self.copies = StepCopies()
        self.swapped_out = self.swapped_in = 0

    # ── second tier of the prefix cache ──

    def keep_evicted(self, key: bytes, block: int) -> None:
        """Plan a copy of an evicted device block to the host, if the host pool has room."""
        target = self.pool.keep(key)
        if target is not None:
            self._copy_out(block, target)
            self.copies.kept.append(key)
            self.pin(target)  # no other copy of the same step may use this host block

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
        self._release_host_blocks(copies)

    def undo(self, copies: StepCopies) -> None:
        """Undo the copies of a step that failed: drop the hashes of blocks that it did not copy."""
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
