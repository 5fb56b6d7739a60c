"""The host side of the KV cache's books: which blocks a step copies out and in, and what if it fails.

The tier behind the device pools, per layer group: it takes preempted sequences' blocks, keeps evicted
prefix blocks by their hash, and writes the step's copies down as `StepMoves`. It decides nothing.
"""

from collections.abc import Callable

from worker.engine.kv.block_pool import BlockPool
from worker.engine.kv.host_pool import HostPool
from worker.engine.kv.moves import StepMoves
from worker.engine.plan import BlockCopy
from worker.engine.sequence import Sequence


class HostTier:
    """One host pool per layer group (empty where nothing is offloaded), and the moves of the step in the making."""

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        self.pools = [HostPool(count) for count in num_blocks]
        self.exists = all(count > 0 for count in num_blocks)
        self.moves = StepMoves()
        self.swapped_out = self.swapped_in = 0

    # ── second tier of the prefix cache ──

    def keeper_of_evicted(self, group: int) -> Callable[[bytes, int], None]:
        """For the device pool of a group to call with what it evicts: (hash, block)."""
        pool = self.pools[group]

        def keep(content: bytes, block: int) -> None:
            target = pool.keep(content)
            if target is not None:
                self._copy_out(group, block, target)
                self.moves.kept.append((group, content))
                self.pin(group, target)  # nobody else may have it copied there in the same step

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
        """Plan copies of the sequence's first blocks (those left in their windows); False if there is no room."""
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
        """The sequence is on its way to the device: its host blocks are free once this step is over."""
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
        """What the step just planned copies; hand it back to `settle` or `undo`."""
        moves, self.moves = self.moves, StepMoves()
        return moves

    def settle(self, moves: StepMoves, pools: list[BlockPool]) -> None:
        """The step has succeeded: what it brought to the device may be shared."""
        for group, block, owner in moves.lifting:
            if pools[group].fenced.get(block) is owner:
                del pools[group].fenced[block]
        self._let_go(moves)

    def undo(self, moves: StepMoves) -> None:
        """The step failed: nothing that it should have copied to the host is trusted."""
        for group, content in moves.kept:
            self.pools[group].forget(content)
        self._let_go(moves)

    def _let_go(self, moves: StepMoves) -> None:
        for group, block in moves.pinned:
            self.pools[group].unpin(block)
        for group, block in moves.leaving:
            self.pools[group].give_back(block)
