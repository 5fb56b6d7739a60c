"""The host side of the KV cache: the blocks that a step copies out and in, and how it is undone.

The tier has one host pool per layer group, behind the device pools. It allocates host blocks for
preempted sequences, keeps evicted prefix blocks by hash, and collects the step's copies in
`StepCopies`. Scheduler and KVManager decide what is copied.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill_worker.engine.kv.block_pool import BlockPool
from tokenmill_worker.engine.kv.host_pool import HostPool
from tokenmill_worker.engine.plan import BlockCopy
from tokenmill_worker.engine.sequence import Sequence


@dataclass(slots=True)
class StepCopies:
    """The copies of one step: filled while it is planned, kept until it is committed or abandoned.

    - `kept`: hashes of evicted prefix blocks that the step copies to the host.
    - `pinned`: host blocks that the step reads or writes.
    - `host_sources`: host blocks of returning sequences, read for the last time.
    - `filled_blocks`: device blocks that the step fills; their hashes are reserved until then.
    - `restored`: sequences with blocks that this step copies from the host.
    - `offloaded`: sequences whose blocks this step copies to the host.
    """

    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    kept: list[tuple[int, bytes]] = field(default_factory=list)  # (group, hash)
    pinned: list[tuple[int, int]] = field(default_factory=list)  # (group, host block)
    host_sources: list[tuple[int, int]] = field(default_factory=list)  # (group, host block)
    filled_blocks: list[tuple[int, int, Sequence]] = field(
        default_factory=list
    )  # (group, block, owner)
    restored: list[Sequence] = field(default_factory=list)
    offloaded: list[Sequence] = field(default_factory=list)
    is_counted: bool = False  # its sequences' num_inflight include the tokens it samples


class HostTier:
    """One host pool per layer group (empty without offload), and the next step's copies."""

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        self.pools = [HostPool(count) for count in num_blocks]
        self.exists = all(count > 0 for count in num_blocks)
        self.copies = StepCopies()
        self.swapped_out = self.swapped_in = 0

    # ── second tier of the prefix cache ──

    def keeper_of_evicted(self, group: int) -> Callable[[bytes, int], None]:
        """Return a callback for the group's device pool.

        It is called as (hash, block) for each evicted block, and plans a copy of the block to the
        host if the host pool has room.
        """
        pool = self.pools[group]

        def keep(content: bytes, block: int) -> None:
            target = pool.keep(content)
            if target is not None:
                self._copy_out(group, block, target)
                self.copies.kept.append((group, content))
                self.pin(group, target)  # no other copy of the same step may use this host block

        return keep

    def pin(self, group: int, host_block: int) -> None:
        self.pools[group].pin(host_block)
        self.copies.pinned.append((group, host_block))

    def copy_in(self, group: int, host_block: int, block: int) -> None:
        self.copies.swap_in.append(BlockCopy(group, host_block, block))
        self.swapped_in += 1

    def _copy_out(self, group: int, block: int, host_block: int) -> None:
        self.copies.swap_out.append(BlockCopy(group, block, host_block))
        self.swapped_out += 1

    # ── preempted sequences ──

    def offload(self, sequence: Sequence, num_blocks: int) -> bool:
        """Plan copies of the sequence's first `num_blocks` blocks to the host.

        Entries that left a sliding window are skipped. Return False if there is no room.
        """
        tables = [table[:num_blocks] for table in sequence.block_tables]
        for pool, table in zip(self.pools, tables, strict=True):
            if sum(1 for block in table if block) > pool.num_free:
                return False
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            host_table = []
            for block in table:
                target = pool.take() if block else None
                host_table.append(-1 if target is None else target)
                if target is not None:
                    self._copy_out(group, block, target)
            sequence.host_tables.append(host_table)
        self.copies.offloaded.append(sequence)
        return True

    def detach(self, sequence: Sequence) -> None:
        """Detach the host blocks of a sequence that returns to the device.

        They are free once the step that reads them is over.
        """
        for group, table in enumerate(sequence.host_tables):
            self.copies.host_sources += [
                (group, host_block) for host_block in table if host_block >= 0
            ]
        sequence.host_tables = []

    def free(self, sequence: Sequence) -> None:
        for pool, table in zip(self.pools, sequence.host_tables, strict=False):
            for block in table:
                if block >= 0:
                    pool.give_back(block)
        sequence.host_tables = []

    # ── steps ──

    def take_copies(self) -> StepCopies:
        """Return the copies of the step just planned; pass them to `commit` or `undo` later."""
        copies, self.copies = self.copies, StepCopies()
        return copies

    def commit(self, copies: StepCopies, pools: list[BlockPool]) -> None:
        """Finish the copies of a step that succeeded: the hashes of the filled blocks count now."""
        for group, block, owner in copies.filled_blocks:
            if pools[group].reserved.get(block) is owner:
                del pools[group].reserved[block]
        self._release_host_blocks(copies)

    def undo(self, copies: StepCopies) -> None:
        """Undo the copies of a step that failed: drop the hashes of blocks that it did not copy."""
        for group, content in copies.kept:
            self.pools[group].forget(content)
        self._release_host_blocks(copies)

    def _release_host_blocks(self, copies: StepCopies) -> None:
        for group, block in copies.pinned:
            self.pools[group].unpin(block)
        for group, block in copies.host_sources:
            self.pools[group].give_back(block)
