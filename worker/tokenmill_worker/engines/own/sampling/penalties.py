"""Presence, frequency and repetition penalties from token histories on the device.

Each penalised sequence has a row with its output tokens by position, and one with its distinct
prompt tokens. A sampled token is written to its position on the device, so the next step needs no
token from the host. A rejected draft or an abandoned step needs no undoing: the position is simply
written again, and a row of the logits reads only the positions before its own. The work grows with
a sequence's length, not with the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenmill_worker.engines.own.sampling.transfer import Indices, to_device
from tokenmill_worker.engines.own.sequence import Sequence

MORE_ROWS, MORE_TOKENS = 16, 1024  # growth step of the tables; `kv.sizing` includes it


@dataclass(slots=True)
class _History:
    slot: int
    num_prompt_ids: int  # distinct ones
    known: int  # output positions [0, known) are on the device


class Histories:
    """Token histories of penalised sequences, and the penalties that follow from them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[Sequence, _History] = {}
        self._free: list[int] = []
        # [slots, output positions]
        self._outputs = torch.zeros((0, 0), dtype=torch.int64, device=device)
        # [slots, distinct prompt ids]
        self._prompts = torch.zeros((0, 0), dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self._found)

    def release(self, sequence: Sequence) -> None:
        history = self._found.pop(sequence, None)
        if history is not None:
            self._free.append(history.slot)
        if not self._found:  # give the memory back
            self._free = []
            self._outputs, self._prompts = (
                table.new_zeros((0, 0)) for table in (self._outputs, self._prompts)
            )

    def open(
        self,
        sequence: Sequence,
        position: int,
        draft_ids: tuple[int, ...],
        forced_ids: tuple[int, ...] = (),
    ) -> tuple[int, int]:
        """Write the history up to output position `position` (exclusive), which ends with the
        forced tokens, and the drafts after it.

        Returns (slot, number of distinct prompt ids). After this step the positions up to and
        including `position` are on the device.
        """
        history = self._found.get(sequence)
        if history is None:
            history = self._start(sequence)
        known = sequence.token_ids[sequence.num_prompt_tokens + history.known :]
        fresh = [*known, *forced_ids][: max(0, position - history.known)]
        wanted = [*fresh, *draft_ids]
        self._outputs = _widened(self._outputs, position + len(draft_ids) + 1)
        if wanted:
            first = min(history.known, position) if fresh else position
            self._outputs[history.slot, first : first + len(wanted)] = to_device(
                np.array(wanted, np.int64), self._device
            )
        history.known = position + 1
        return history.slot, history.num_prompt_ids

    def _start(self, sequence: Sequence) -> _History:
        if not self._free:
            rows = self._outputs.shape[0]
            self._free = list(range(rows + MORE_ROWS - 1, rows - 1, -1))
            self._outputs = _taller(self._outputs, rows + MORE_ROWS)
            self._prompts = _taller(self._prompts, rows + MORE_ROWS)
        slot = self._free.pop()
        prompt = np.unique(np.array(sequence.token_ids[: sequence.num_prompt_tokens], np.int64))
        self._prompts = _widened(self._prompts, len(prompt))
        self._prompts[slot, : len(prompt)] = to_device(prompt, self._device)
        history = self._found[sequence] = _History(slot, len(prompt), 0)
        return history

    def apply(self, logits: Tensor, rows: Tensor, history: HistoryIndex, penalties: Tensor) -> None:
        """Penalise `rows` of the logits in place.

        `penalties` is [rows, 3]: presence, frequency, repetition.
        """
        part = logits[rows]
        presence, frequency, repetition = penalties[:, :1], penalties[:, 1:2], penalties[:, 2:]
        output_ids, counted = _read(self._outputs, history.slots, history.lengths, history.longest)
        if history.repeats:
            prompt_ids, _ = _read(
                self._prompts, history.slots, history.prompt_lengths, history.longest_prompt
            )
            # an empty history is replaced by the first prompt id; a prompt is never empty
            output_ids = (
                torch.where(counted, output_ids, prompt_ids[:, :1])
                if history.longest
                else output_ids
            )
            _repel(part, torch.cat((prompt_ids, output_ids), dim=1), repetition)
        if history.longest:
            output_ids, _ = _read(self._outputs, history.slots, history.lengths, history.longest)
            values = part.gather(1, output_ids)
            part.scatter_(
                1, output_ids, torch.where(history.lengths > 0, values - presence, values)
            )
            part.scatter_add_(1, output_ids, torch.where(counted, -frequency, 0.0))
        logits[rows] = part

    def record(self, token_ids: Tensor, rows: Tensor, history: HistoryIndex) -> None:
        """Write the sampled tokens of the rows to their output positions."""
        self._outputs[history.slots, history.lengths.squeeze(1)] = token_ids[rows]


@dataclass(frozen=True, slots=True)
class HistoryIndex:
    """Location of each penalised row's history.

    `lengths` counts the output tokens before the row's own position.
    """

    slots: Tensor  # [rows]
    lengths: Tensor  # [rows, 1]
    prompt_lengths: Tensor  # [rows, 1]
    longest: int
    longest_prompt: int
    repeats: bool  # whether any row has a repetition penalty

    @classmethod
    def build(
        cls, slots: Indices, lengths: Indices, prompts: Indices, repeats: bool, device: torch.device
    ) -> HistoryIndex:
        packed = to_device(np.stack((slots, lengths, prompts)), device)
        return cls(
            slots=packed[0],
            lengths=packed[1, :, None],
            prompt_lengths=packed[2, :, None],
            longest=int(lengths.max(initial=0)),
            longest_prompt=int(prompts.max(initial=0)),
            repeats=repeats,
        )


def _read(table: Tensor, slots: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return ids [rows, longest], and a mask of those that count.

    The others repeat the row's first id, or id 0 if it has none.
    """
    ids = table[slots, :longest]
    counted = torch.arange(longest, device=table.device) < lengths
    first = ids[:, :1] if longest else ids
    return torch.where(counted, ids, torch.where(lengths > 0, first, 0)), counted


def _repel(part: Tensor, ids: Tensor, repetition: Tensor) -> None:
    """Apply the repetition penalty to `ids` of each row.

    Equal ids write equal values, so the order of the scatter's writes does not matter.
    """
    values = part.gather(1, ids)
    part.scatter_(1, ids, torch.where(values > 0, values / repetition, values * repetition))


def _widened(table: Tensor, width: int) -> Tensor:
    if width <= table.shape[1]:
        return table
    grown = table.new_zeros((table.shape[0], -(-width // MORE_TOKENS) * MORE_TOKENS))
    grown[:, : table.shape[1]] = table
    return grown


def _taller(table: Tensor, height: int) -> Tensor:
    grown = table.new_zeros((height, table.shape[1]))
    grown[: table.shape[0]] = table
    return grown
