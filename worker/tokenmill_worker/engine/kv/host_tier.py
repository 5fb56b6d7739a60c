"""The host side of the KV cache: which blocks a step copies out and in, and what to undo if it fails.

The tier has one host pool per layer group, behind the device pools. It allocates host blocks for
preempted sequences, keeps evicted prefix blocks by hash, and collects the step's copies in
`StepMoves`. Scheduler and KVManager decide what moves.
"""

from collections.abc import Callable

from tokenmill_worker.engine.kv.block_pool import BlockPool
from tokenmill_worker.engine.kv.host_pool import HostPool
from tokenmill_worker.engine.kv.moves import StepMoves
from tokenmill_worker.engine.plan import BlockCopy
from tokenmill_worker.engine.sequence import Sequence


class HostTier:
    """One host pool per layer group (empty without offload), and the moves of the step being planned."""

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        self.pools = [HostPool(count) for count in num_blocks]
        self.exists = all(count > 0 for count in num_blocks)
        self.moves = StepMoves()
        self.swapped_out = self.swapped_in = 0

    # ── second tier of the prefix cache ──

    def keeper_of_evicted(self, group: int) -> Callable[[bytes, int], None]:
        """Return a callback for the group's device pool, called as (hash, block) for each evicted block.

        It plans a copy of the block to the host, if the host pool has room.
        """
        pool = self.pools[group]

        def keep(content: bytes, block: int) -> None:
            target = pool.keep(content)
            if target is not None:
                self._copy_out(group, block, target)
                self.moves.kept.append((group, content))
                self.pin(group, target)  # no other copy of the same step may use this host block

        return keep

    def pin(self, group: int, host_block: int) -> None:
        self.pools[group].pin(host_block)
        self.moves.pinned.append((group, host_block))

    def copy_in(self, group: int, host_block: int, block: int) -> None:
        self.moves.swap_in.append(BlockCopy(group, host_block, block))
        self.swapped_in += 1

    def _copy_out(self, group: int, block: int, host_block: int) -> None:
        self.moves.swap_out.append(BlockCopy(group, block, host_block))
        self.swapped_out += 1

    # ── preempted sequences ──

    def take_over(self, sequence: Sequence, num_blocks: int) -> bool:
        """Plan copies of the sequence's first `num_blocks` blocks to the host; False if there is no
        room.

        Entries that left a sliding window are skipped.
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
        self.moves.offloaded.append(sequence)
        return True

    def hand_back(self, sequence: Sequence) -> None:
        """Detach the host blocks of a sequence that returns to the device.

        They are free once the step that reads them is over.
        """
        for group, table in enumerate(sequence.host_tables):
            self.moves.leaving += [(group, host_block) for host_block in table if host_block >= 0]
        sequence.host_tables = []

    def free(self, sequence: Sequence) -> None:
        for pool, table in zip(self.pools, sequence.host_tables, strict=False):
            for block in table:
                if block >= 0:
                    pool.give_back(block)
        sequence.host_tables = []

    # ── steps ──

    def take_moves(self) -> StepMoves:
        """Return the moves of the step just planned; pass them to `settle` or `undo` later."""
        moves, self.moves = self.moves, StepMoves()
        return moves

    def settle(self, moves: StepMoves, pools: list[BlockPool]) -> None:
        """Finish the moves of a step that succeeded: lift the fences of the blocks it copied in."""
        for group, block, owner in moves.lifting:
            if pools[group].fenced.get(block) is owner:
                del pools[group].fenced[block]
        self._let_go(moves)

    def undo(self, moves: StepMoves) -> None:
        """Undo the moves of a step that failed: drop the hashes of blocks it should have copied out."""
        for group, content in moves.kept:
            self.pools[group].forget(content)
        self._let_go(moves)

    def _let_go(self, moves: StepMoves) -> None:
        for group, block in moves.pinned:
            self.pools[group].unpin(block)
        for group, block in moves.leaving:
            self.pools[group].give_back(block)
