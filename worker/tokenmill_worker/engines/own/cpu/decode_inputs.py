"""Reuses the inputs of a decode for the next one: same sequences, one token further.

Most steps are of this kind. Their tensors are reused and incremented; block tables are rebuilt only
when a token is the first of a block. Tensors are overwritten in place, so the device must have read
a step's inputs before the next ones are made. That holds on the CPU.

Assumption: while a sequence has the same `epoch`, the block that it writes to stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tokenmill_worker.engines.own.attention import AttentionMetadata
from tokenmill_worker.engines.own.device import AssumedTokens, BlockTables, StepInputs
from tokenmill_worker.engines.own.plan import ScheduledSequence


class DecodeInputs:
    """Increments the inputs of a step that computed and sampled one token of each of `items`."""

    def __init__(self, items: Seq[ScheduledSequence], inputs: StepInputs) -> None:
        metadata = inputs.metadata
        self._inputs = inputs
        self._sequences = [item.sequence for item in items]
        self._epochs = [item.sequence.epoch for item in items]
        self._size = metadata[0].block_size
        self._ids: npt.NDArray[np.int64] = inputs.input_ids.numpy()
        self._positions: npt.NDArray[np.int64] = inputs.positions.numpy()
        self._slots: list[npt.NDArray[np.int64]] = [one.slot_mapping.numpy() for one in metadata]
        self._ends: npt.NDArray[np.int32] = metadata[0].seq_lens.numpy()  # shared by all groups
        self._metadata = metadata

    def advance(
        self,
        items: Seq[ScheduledSequence],
        block_tables: BlockTables,
        assumed: AssumedTokens | None = None,
    ) -> StepInputs | None:
        """Increment the inputs and return them.

        Return None, and change nothing, unless `items` are the next tokens of the same sequences.
        """
        if len(items) != len(self._sequences):
            return None
        ids = []
        starts = self._positions.tolist()
        for item, sequence, start, epoch in zip(
            items, self._sequences, starts, self._epochs, strict=True
        ):
            known: Seq[int] = sequence.token_ids
            place = item.start
            if assumed is not None and place >= len(known):
                known, place = assumed.get(sequence, ()), place - len(known)
            if (
                item.sequence is not sequence
                or item.start != start + 1
                or item.num_tokens != 1
                or not item.samples
                or sequence.epoch != epoch
                or len(known) <= place
            ):
                return None
            ids.append(known[place])
        self._ids[:] = ids
        self._positions += 1
        self._ends += 1
        return replace(self._inputs, metadata=self._count_up(items, block_tables))

    def _count_up(
        self, items: Seq[ScheduledSequence], block_tables: BlockTables
    ) -> tuple[AttentionMetadata, ...]:
        lens = tuple(self._ends.tolist())
        longest = max(lens)
        indices, offsets = np.divmod(self._positions, self._size)
        found = None if offsets.all() else block_tables(items, longest)
        self._metadata = tuple(
            replace(
                one,
                block_table=one.block_table if found is None else found[group],
                max_seq_len=longest,
                seq_lens_host=lens,
            )
            for group, one in enumerate(self._metadata)
        )
        if found is None:
            for slots in self._slots:
                slots += 1
        else:
            rows = np.arange(len(items))
            for slots, table in zip(self._slots, found, strict=True):
                slots[:] = table.numpy()[rows, indices]
                slots *= self._size
                slots += offsets
        return self._metadata
