"""Builds a step's tensors from its plan: tokens, positions, slots, block tables, needed rows.

A row per running sequence keeps its block tables, which are extended rather than rebuilt.
Arithmetic is done for the whole step in numpy; the only Python loops go over the scheduled
sequences. All inputs reach the device in two copies. A token that is not on the host yet is taken
from the previous step's sampled tensor.

Assumption: while a sequence stays scheduled with the same `epoch`, entries of its block tables
below the first position of the step change only to NULL_BLOCK.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tokenmill_worker.engines.own.attention import AttentionMetadata, CommonPrefix
from tokenmill_worker.engines.own.attention.common_prefix import FoundPrefix, find_prefix
from tokenmill_worker.engines.own.config.cache import CacheConfig
from tokenmill_worker.engines.own.device import AssumedTokens, Device, RepeatedInputs, StepInputs
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepPlan
from tokenmill_worker.engines.own.sequence import Sequence

Ints = npt.NDArray[np.int64]


class PreviousTokens:
    """Tokens that the last launched step sampled for `items`; they are only on the device."""

    def __init__(self, token_ids: Tensor, items: Seq[ScheduledSequence]) -> None:
        self.token_ids = token_ids
        self._items = items

    @cached_property
    def rows(self) -> dict[Sequence, int]:
        """Rows of the tokens, by sequence.

        Sequences with drafts are left out: which of their rows holds the last accepted token is not
        known yet.
        """
        rows: dict[Sequence, int] = {}
        row = 0
        for item in self._items:
            if not item.draft_ids:
                rows[item.sequence] = row
            row += 1 + len(item.draft_ids)
        return rows


class InputBuilder:
    """Builds step inputs and keeps a row of block tables per sequence.

    Call `release` when a sequence ends or is preempted.
    """

    def __init__(
        self,
        cache: CacheConfig,
        max_model_len: int,
        device: Device,
        num_rows: int,
        least_saved: Seq[int | None] = (),  # of `find_prefix`, by layer group; None: do not look
    ) -> None:
        self._cache = cache
        self._least_saved = least_saved or [None] * len(cache.groups)
        self._upload = device.upload
        self._repeated_inputs = device.repeated_inputs
        self._rows: dict[Sequence, int] = {}
        self._free: list[int] = []
        self._epochs: list[int] = []
        self._filled: list[list[int]] = [[] for _ in cache.groups]  # up-to-date entries of each row
        # the kernel blocks of each row's blocks: [rows, blocks, kernel blocks of a block]
        self._tables = [
            np.zeros((0, -(-max_model_len // size) + 1, group.kernel_blocks), np.int32)
            for group, size in zip(cache.groups, cache.block_sizes, strict=True)
        ]
        self._last: RepeatedInputs | None = None  # the previous step, if it was a decode
        self._grow(num_rows)

    def release(self, sequence: Sequence) -> int | None:
        """Free the sequence's row and return it, if it has one."""
        row = self._rows.pop(sequence, None)
        if row is not None:
            self._free.append(row)
        return row

    def build(
        self,
        plan: StepPlan,
        previous: PreviousTokens | None = None,
        assumed: AssumedTokens | None = None,
    ) -> StepInputs:
        """Build the tensors of a step; on a CPU they are valid until the next call."""
        items, size = plan.scheduled, self._cache.block_size
        last, self._last = self._last, None
        inputs = last.advance(items, self._tables_of, assumed) if last is not None else None
        if inputs is not None:
            self._last = last
            return inputs
        layout = _lay_out(items)
        rows = self._update_rows(items)
        token_ids, missing = self._token_ids(items, layout.query_start, previous, assumed)
        blocks, offsets = np.divmod(layout.positions, size)
        owners = rows if layout.owner is None else rows[layout.owner]
        slots = [
            table[owners, blocks].astype(np.int64) * size + offsets
            for table in self._kernel_tables()
        ]
        longs = self._upload([token_ids, layout.positions, layout.rows, *slots, *missing], np.int64)
        max_seq_len = int(layout.ends.max())
        tables = self._cut(rows, max_seq_len)
        found = self._find_prefixes(tables, layout)
        ranges = [array for each in found if each for array in (each.lens, each.bounds)]
        shorts = self._upload([layout.query_start, layout.ends, *tables, *ranges], np.int32)
        prefixes = _on_device(found, shorts[2:])
        input_ids = longs[0]
        if previous is not None and missing:
            input_ids.index_copy_(0, longs[-2], previous.token_ids.index_select(0, longs[-1]))
        max_query_len, seq_lens = max(layout.query_lens), tuple(layout.ends.tolist())
        metadata = tuple(
            AttentionMetadata(
                query_start=shorts[0],
                seq_lens=shorts[1],
                block_table=shorts[2 + group],
                slot_mapping=longs[3 + group],
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                block_size=size,
                window=self._cache.groups[group].window,
                query_lens_host=layout.query_lens,
                seq_lens_host=seq_lens,
                prefix=prefixes[group],
            )
            for group in range(len(tables))
        )
        inputs = StepInputs(
            input_ids, longs[1], longs[2], metadata, sequence_rows=tuple(rows.tolist())
        )
        if layout.owner is None and len(layout.rows) == len(items):
            self._last = self._repeated_inputs(items, inputs)
        return inputs

    # ── tokens ──

    def _token_ids(
        self,
        items: Seq[ScheduledSequence],
        query_start: Ints,
        previous: PreviousTokens | None,
        assumed: AssumedTokens | None,
    ) -> tuple[Ints, list[Ints]]:
        """Return the token ids in packed order, with 0 for those not on the host.

        Also return, if any are missing, their packed rows and their rows in the previous step's
        tokens.
        """
        token_ids: list[int] = []
        packed: list[int] = []
        sampled: list[int] = []
        for item, first in zip(items, query_start.tolist(), strict=False):
            known = item.sequence.token_ids
            if assumed is not None and item.start >= len(known):
                token_ids.append(assumed[item.sequence][item.start - len(known)])
                continue
            stop = item.start + item.num_tokens - item.num_proposed
            if item.num_tokens == 1 and stop <= len(known):
                token_ids.append(known[item.start])
                continue
            token_ids.extend(known[item.start : stop])
            if stop > len(known):
                if stop > len(known) + 1 or previous is None or item.sequence not in previous.rows:
                    raise RuntimeError(
                        f"a token of {item.sequence.request_id} is neither on the host "
                        "nor in flight"
                    )
                packed.append(first + stop - 1 - item.start)
                sampled.append(previous.rows[item.sequence])
                token_ids.append(0)
            token_ids.extend(item.forced_ids)
            token_ids.extend(item.draft_ids)
        missing = [np.array(packed, np.int64), np.array(sampled, np.int64)] if packed else []
        return np.array(token_ids, np.int64), missing

    # ── blocks ──

    def _tables_of(self, items: Seq[ScheduledSequence], max_seq_len: int) -> list[Tensor]:
        return self._upload(self._cut(self._update_rows(items), max_seq_len), np.int32)

    def _cut(self, rows: Ints, max_seq_len: int) -> list[npt.NDArray[np.int32]]:
        """Return the rows' block tables by group, as wide as the longest sequence needs."""
        num_blocks = -(-max_seq_len // self._cache.block_size)
        return [table[rows, :num_blocks] for table in self._kernel_tables()]

    def _find_prefixes(
        self, tables: Seq[npt.NDArray[np.int32]], layout: _TokenLayout
    ) -> list[FoundPrefix | None]:
        """Return the common prefix of a decode's sequences by group; None where there is none."""
        return [
            find_prefix(table, layout.ends, self._cache.block_size, least_saved)
            if least_saved is not None and layout.owner is None
            else None
            for table, least_saved in zip(tables, self._least_saved, strict=True)
        ]

    def _kernel_tables(self) -> list[npt.NDArray[np.int32]]:
        """View the block tables as tables of kernel blocks, one row each."""
        return [table.reshape(len(table), -1) for table in self._tables]

    def _update_rows(self, items: Seq[ScheduledSequence]) -> Ints:
        """Bring the block tables of the sequences' rows up to date; return the rows."""
        rows = [self._row(item.sequence) for item in items]
        sizes = self._cache.block_sizes
        for group, (table, filled) in enumerate(zip(self._tables, self._filled, strict=True)):
            size = sizes[group]
            changed: list[int] = []  # rows with one new entry, in most steps all: written at once
            indices: list[int] = []
            blocks: list[int] = []
            for item, row in zip(items, rows, strict=True):
                entries = item.sequence.block_tables[group]
                end = len(entries)
                start = min(filled[row], item.start // size)
                if end > table.shape[1]:
                    raise RuntimeError(
                        f"{item.sequence.request_id} holds more blocks "
                        "than the model's length needs"
                    )
                if end - start == 1:
                    changed.append(row)
                    indices.append(start)
                    blocks.append(entries[start])
                else:
                    table[row, start:end] = _kernel_blocks(entries[start:], table.shape[2])
                filled[row] = end
            table[changed, indices] = _kernel_blocks(blocks, table.shape[2])
        return np.array(rows, np.int64)

    def _row(self, sequence: Sequence) -> int:
        row = self._rows.get(sequence)
        if row is None:
            if not self._free:
                self._grow(max(1, len(self._epochs)))
            row = self._rows[sequence] = self._free.pop()
            self._epochs[row] = -1
        if self._epochs[row] != sequence.epoch:
            self._epochs[row] = sequence.epoch
            for filled in self._filled:
                filled[row] = 0
        return row

    def _grow(self, count: int) -> None:
        old = len(self._epochs)
        self._free.extend(range(old + count - 1, old - 1, -1))
        self._epochs.extend([-1] * count)
        for filled in self._filled:
            filled.extend([0] * count)
        self._tables = [
            np.concatenate([table, np.zeros((count, *table.shape[1:]), np.int32)])
            for table in self._tables
        ]


def _on_device(found: Seq[FoundPrefix | None], shorts: Seq[Tensor]) -> list[CommonPrefix | None]:
    """Return the prefixes by group; `shorts` are the groups' block tables, then their arrays."""
    arrays = iter(shorts[len(found) :])
    return [
        None if prefix is None else CommonPrefix(next(arrays), next(arrays), table[prefix.leader])
        for prefix, table in zip(found, shorts, strict=False)
    ]


def _kernel_blocks(blocks: list[int], count: int) -> npt.NDArray[np.int32]:
    """Return the `count` kernel blocks of each block: `[blocks, count]`."""
    return np.array(blocks, np.int32)[:, None] * count + np.arange(count, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _TokenLayout:
    """Positions of a step's tokens, one item after the other."""

    query_lens: tuple[int, ...]
    query_start: Ints  # [items + 1]
    positions: Ints  # [tokens]
    ends: Ints  # [items]
    owner: Ints | None  # [tokens]: index of each token's item; None: one token per item
    rows: Ints  # packed rows whose logits are needed


def _lay_out(items: Seq[ScheduledSequence]) -> _TokenLayout:
    """Compute the layout; a step of decodes alone, as most are, skips most of the arithmetic."""
    count = len(items)
    starts = np.array([item.start for item in items], np.int64)
    query_lens = tuple([item.num_tokens for item in items])
    if max(query_lens) == 1:
        needed = [row for row, item in enumerate(items) if item.samples or item.num_scored]
        rows = np.array(needed, np.int64)
        return _TokenLayout(query_lens, np.arange(count + 1), starts, starts + 1, None, rows)
    lens = np.array(query_lens, np.int64)
    query_start = np.zeros(count + 1, np.int64)
    np.cumsum(lens, out=query_start[1:])
    owner = np.repeat(np.arange(count), lens)
    positions = np.arange(len(owner)) + (starts - query_start[:-1])[owner]
    return _TokenLayout(
        query_lens, query_start, positions, starts + lens, owner, _needed_rows(items, query_start)
    )


def _needed_rows(items: Seq[ScheduledSequence], query_start: Ints) -> Ints:
    """Return the packed rows whose logits are needed, in ascending order.

    They are, per item, those before its scored tokens, then its last 1 + len(draft_ids) if it
    samples.
    """
    rows: list[int] = []
    starts = query_start.tolist()
    for item, start, end in zip(items, starts, starts[1:], strict=False):
        if item.num_scored:
            first = start + item.scored_from - 1 - item.start
            rows.extend(range(first, first + item.num_scored))
        if item.samples:
            rows.extend(range(end - 1 - len(item.draft_ids), end))
    return np.array(rows, np.int64)
