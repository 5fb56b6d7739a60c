"""From a plan to the tensors of one step: token ids, positions, slots, block tables, sampled rows.

Keeps a row per running sequence with its block tables, extended rather than rebuilt. All arithmetic is
done for the whole step in numpy; the only Python loop goes over the scheduled sequences. Everything goes
to the device in two copies, and a token that is not on the host yet is taken from the previous step's
sampled tensor. It knows neither the model nor the sampler.

Relied upon: while a sequence stays scheduled and its `epoch` stays the same, entries of its block tables
below the first position of the step change only to NULL_BLOCK.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.engine.attention import AttentionMetadata
from worker.engine.config import CacheConfig
from worker.engine.plan import ScheduledSequence, StepPlan
from worker.engine.sequence import Sequence

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model and the sampler read."""

    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    rows: Tensor  # int64 [num_sampled_rows]: the packed rows whose logits are wanted
    metadata: tuple[AttentionMetadata, ...]  # by layer group


class PreviousTokens:
    """The tokens that the last launched step sampled: on the device, not yet on the host."""

    def __init__(self, token_ids: Tensor, rows: Mapping[Sequence, int]) -> None:
        self.token_ids = token_ids
        self.rows = rows


class InputBuilder:
    """Owns the rows. Call `release` when a sequence ends or is preempted."""

    def __init__(self, cache: CacheConfig, max_model_len: int, device: torch.device, num_rows: int) -> None:
        self._cache = cache
        self._device = device
        self._width = -(-max_model_len // cache.block_size) + 1
        self._rows: dict[Sequence, int] = {}
        self._free: list[int] = []
        self._epochs = np.full(0, -1, np.int64)
        self._filled = np.zeros((len(cache.groups), 0), np.int64)  # entries of each row that are up to date
        self._tables = [np.zeros((0, self._width), np.int32) for _ in cache.groups]
        self._grow(num_rows)

    def release(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence, None)
        if row is not None:
            self._free.append(row)

    @property
    def num_rows_in_use(self) -> int:
        return len(self._rows)

    def build(self, plan: StepPlan, previous: PreviousTokens | None = None) -> StepInputs:
        items = plan.scheduled
        starts = np.fromiter((item.start for item in items), np.int64, len(items))
        query_lens = np.fromiter((item.num_tokens for item in items), np.int64, len(items))
        rows = np.fromiter((self._row(item) for item in items), np.int64, len(items))
        ends = starts + query_lens
        query_start = np.concatenate([[0], np.cumsum(query_lens)])
        num_tokens = int(query_start[-1])
        owner = np.repeat(np.arange(len(items)), query_lens)
        positions = np.arange(num_tokens) + (starts - query_start[:-1])[owner]
        token_ids, missing = self._token_ids(items, query_start, previous)
        slots = [self._slots(group, rows[owner], positions) for group in range(len(self._tables))]
        sampled = _sampled_rows(items, query_start)
        longs = self._to_device([token_ids, positions, sampled, *slots, *missing], torch.int64)
        num_blocks = int(-(-ends.max() // self._cache.block_size))
        tables = [table[rows, :num_blocks] for table in self._tables]
        shorts = self._to_device([query_start, ends, *tables], torch.int32)
        input_ids = longs[0]
        if previous is not None and len(missing[0]):
            input_ids.index_copy_(0, longs[-2], previous.token_ids.index_select(0, longs[-1]))
        metadata = tuple(
            AttentionMetadata(
                query_start=shorts[0],
                seq_lens=shorts[1],
                block_table=shorts[2 + group],
                slot_mapping=longs[3 + group],
                max_query_len=int(query_lens.max()),
                max_seq_len=int(ends.max()),
                block_size=self._cache.block_size,
                window=self._cache.groups[group].window,
                query_lens_host=tuple(query_lens.tolist()),
                seq_lens_host=tuple(ends.tolist()),
            )
            for group in range(len(tables))
        )
        return StepInputs(input_ids, longs[1], longs[2], metadata)

    # ── tokens ──

    def _token_ids(
        self, items: Seq[ScheduledSequence], query_start: Ints, previous: PreviousTokens | None
    ) -> tuple[Ints, tuple[Ints, Ints]]:
        """Ids in packed order, and (packed row, row of the previous step's sampled tensor) of those not on the host."""
        token_ids: list[int] = []
        packed: list[int] = []
        sampled: list[int] = []
        for item, first in zip(items, query_start.tolist(), strict=False):
            known = item.sequence.token_ids
            stop = item.start + item.num_tokens - len(item.draft_ids)
            if item.num_tokens == 1 and stop <= len(known):
                token_ids.append(known[item.start])
                continue
            token_ids.extend(known[item.start : stop])
            if stop > len(known):
                if stop > len(known) + 1 or previous is None or item.sequence not in previous.rows:
                    raise RuntimeError(f"a token of {item.sequence.request_id} is neither on the host nor in flight")
                packed.append(first + stop - 1 - item.start)
                sampled.append(previous.rows[item.sequence])
                token_ids.append(0)
            token_ids.extend(item.draft_ids)
        return np.array(token_ids, np.int64), (np.array(packed, np.int64), np.array(sampled, np.int64))

    # ── blocks ──

    def _row(self, item: ScheduledSequence) -> int:
        """The sequence's row, with its tables brought up to date."""
        sequence = item.sequence
        row = self._rows.get(sequence)
        if row is None:
            if not self._free:
                self._grow(max(1, len(self._epochs)))
            row = self._rows[sequence] = self._free.pop()
            self._epochs[row] = -1
        if self._epochs[row] != sequence.epoch:
            self._epochs[row] = sequence.epoch
            self._filled[:, row] = 0
        first = item.start // self._cache.block_size
        for group, table in enumerate(self._tables):
            entries = sequence.block_tables[group]
            start = min(int(self._filled[group, row]), first)
            if len(entries) > self._width:
                raise RuntimeError(f"{sequence.request_id} holds more blocks than the model's length needs")
            if len(entries) - start == 1:
                table[row, start] = entries[start]
            else:
                table[row, start : len(entries)] = entries[start:]
            self._filled[group, row] = len(entries)
        return row

    def _slots(self, group: int, rows: Ints, positions: Ints) -> Ints:
        blocks, offsets = np.divmod(positions, self._cache.block_size)
        slots: Ints = self._tables[group][rows, blocks].astype(np.int64) * self._cache.block_size + offsets
        return slots

    def _grow(self, count: int) -> None:
        old = len(self._epochs)
        self._free.extend(range(old + count - 1, old - 1, -1))
        self._epochs = np.concatenate([self._epochs, np.full(count, -1, np.int64)])
        self._filled = np.concatenate([self._filled, np.zeros((len(self._tables), count), np.int64)], axis=1)
        self._tables = [np.concatenate([t, np.zeros((count, self._width), np.int32)]) for t in self._tables]

    # ── to the device ──

    def _to_device(self, arrays: Seq[npt.NDArray[Any]], kind: torch.dtype) -> list[Tensor]:
        """One copy for all arrays. Pinned memory is torch's to recycle: it waits for the copy to be done."""
        total = sum(array.size for array in arrays)
        staging = torch.empty(total, dtype=kind, pin_memory=self._device.type == "cuda")
        flat = staging.numpy()
        offset = 0
        for array in arrays:
            flat[offset : offset + array.size] = array.ravel()
            offset += array.size
        moved = staging.to(self._device, non_blocking=True)
        parts = torch.split(moved, [array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _sampled_rows(items: Seq[ScheduledSequence], query_start: Ints) -> Ints:
    """The last row of each item that samples, and before it those of its drafts."""
    rows: list[int] = []
    for item, end in zip(items, query_start[1:].tolist(), strict=True):
        if item.samples:
            rows.extend(range(end - 1 - len(item.draft_ids), end))
    return np.array(rows, np.int64)
