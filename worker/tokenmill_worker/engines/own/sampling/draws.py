"""Samples the rows of one batch composition: by a kernel, or by torch in groups of similar rows.

Both choose the same tokens from the same noise. A composition is prepared for one of the two, with
its parameters on the host or on the device as that one needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenmill_worker.engines.own.sampling import truncation
from tokenmill_worker.engines.own.sampling.noise import argmax, race, row_keys
from tokenmill_worker.engines.own.sampling.parameter_table import (
    COUNTS,
    NUMBERS,
    ParameterTable,
    ParamFlags,
)
from tokenmill_worker.engines.own.sampling.transfer import Indices, to_device
from tokenmill_worker.engines.own.sampling.truncation import TruncationLimits


class PreparedSampling(Protocol):
    """One composition, ready to be sampled from."""

    @property
    def is_greedy(self) -> bool:
        """Return whether every row takes its highest logit."""
        ...

    def draw(self, logits: Tensor, positions: Indices) -> tuple[Tensor, Tensor]:
        """Return token ids [rows] and each row's highest logit [rows], which is finite in a good
        row.

        `positions` [rows] is each row's output position, which its noise depends on.
        """
        ...


class SamplingBackend(Protocol):
    def prepare(self, table: ParameterTable, slots: Indices) -> PreparedSampling:
        """Prepare a composition; `slots` is each row's index in the parameter table."""
        ...


def _is_greedy(table: ParameterTable, slots: Indices) -> npt.NDArray[np.bool_]:
    greedy: npt.NDArray[np.bool_] = (table.flags[slots] & int(ParamFlags.GREEDY)) != 0
    return greedy


# ── by a kernel ──


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """Sampling parameters of each row; all arrays are `[rows]` and contiguous."""

    inverse_temperature: npt.NDArray[np.float32]  # 0: the highest logit
    log_min_p: npt.NDArray[np.float32]  # −inf: off
    top_p: npt.NDArray[np.float64]  # 1: off
    top_k: npt.NDArray[np.int64]  # the vocabulary's size or more: off


class Kernel(Protocol):
    """Samples all rows in one pass over their logits.

    With `takes_any_dtype` it reads logits of any type, else only float32.
    """

    takes_any_dtype: bool

    def draw(
        self, logits: Tensor, arrays: SamplingArrays, keys: npt.NDArray[np.int32]
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class KernelSamplingBackend:
    kernel: Kernel

    def prepare(self, table: ParameterTable, slots: Indices) -> PreparedSampling:
        greedy = _is_greedy(table, slots)
        numbers = table.numbers[slots]
        temperature = numbers[:, NUMBERS.index("temperature")]
        arrays = SamplingArrays(
            inverse_temperature=np.where(
                greedy, 0.0, 1.0 / np.where(greedy, 1.0, temperature)
            ).astype(np.float32),
            log_min_p=numbers[:, NUMBERS.index("log_min_p")].astype(np.float32),
            top_p=np.ascontiguousarray(numbers[:, NUMBERS.index("top_p")]),
            top_k=np.ascontiguousarray(table.counts[slots, COUNTS.index("top_k")]),
        )
        no_noise = np.zeros((len(slots), 2), np.int32) if greedy.all() else None
        return _KernelSampling(self.kernel, arrays, table.seeds[slots], no_noise)


@dataclass(frozen=True, slots=True)
class _KernelSampling:
    kernel: Kernel
    arrays: SamplingArrays
    seeds: npt.NDArray[np.uint64]
    no_noise: npt.NDArray[np.int32] | None  # unused keys, if all rows are greedy

    @property
    def is_greedy(self) -> bool:
        return self.no_noise is not None

    def draw(self, logits: Tensor, positions: Indices) -> tuple[Tensor, Tensor]:
        keys = row_keys(self.seeds, positions) if self.no_noise is None else self.no_noise
        return self.kernel.draw(logits, self.arrays, keys)


# ── by torch ──


@dataclass(frozen=True, slots=True)
class _SampledRows:
    """Rows that are sampled with noise; `rows` is None for every row of the batch."""

    rows: Tensor | None
    inverse_temperature: Tensor  # [rows, 1] float32
    log_min_p: Tensor | None  # [rows, 1]; None: no row has a min-p
    limits: TruncationLimits | None  # None: neither top-k nor top-p


class TorchSamplingBackend:
    """Samples by torch on any device; on an accelerator it never synchronises with it."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocabulary = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def prepare(self, table: ParameterTable, slots: Indices) -> PreparedSampling:
        greedy = _is_greedy(table, slots)
        truncated = (table.flags[slots] & int(ParamFlags.TRUNCATED)) != 0
        plain = np.flatnonzero(~greedy & ~truncated)
        groups = [
            self._group(table, slots, rows)
            for rows in (plain, np.flatnonzero(truncated))
            if len(rows)
        ]
        is_mixed = bool(groups) and bool(greedy.any())
        greedy_rows = to_device(np.flatnonzero(greedy), self._device) if is_mixed else None
        return _TorchSampling(
            self._device, self._vocabulary, table.seeds[slots], greedy_rows, tuple(groups)
        )

    def _group(self, table: ParameterTable, row_slots: Indices, rows: Indices) -> _SampledRows:
        slots = row_slots[rows]
        numbers = table.numbers[slots]
        log_min_p = numbers[:, NUMBERS.index("log_min_p"), None].astype(np.float32)
        is_truncated = table.flags[slots[0]] & ParamFlags.TRUNCATED
        return _SampledRows(
            rows=None if len(rows) == len(row_slots) else to_device(rows, self._device),
            inverse_temperature=to_device((1.0 / numbers[:, :1]).astype(np.float32), self._device),
            log_min_p=to_device(log_min_p, self._device) if np.isfinite(log_min_p).any() else None,
            limits=self._limits(table, slots, log_min_p) if is_truncated else None,
        )

    def _limits(
        self, table: ParameterTable, slots: Indices, log_min_p: npt.NDArray[np.float32]
    ) -> TruncationLimits:
        top_k = table.counts[slots, COUNTS.index("top_k")]
        limited = top_k[top_k < table.vocab_size]
        return TruncationLimits(
            top_k=to_device(top_k[:, None], self._device),
            top_p=to_device(table.numbers[slots, NUMBERS.index("top_p"), None], self._device),
            log_min_p=to_device(log_min_p, self._device),
            max_top_k=int(limited.max(initial=0)),
            bounded=len(limited) == len(top_k),
        )


@dataclass(frozen=True, slots=True)
class _TorchSampling:
    device: torch.device
    vocabulary: Tensor
    seeds: npt.NDArray[np.uint64]
    # rows; None where the groups cover all rows, or where there are no groups
    greedy: Tensor | None
    groups: tuple[_SampledRows, ...]  # empty: all rows are greedy

    @property
    def is_greedy(self) -> bool:
        return not self.groups

    def draw(self, logits: Tensor, positions: Indices) -> tuple[Tensor, Tensor]:
        if not self.groups:
            token_ids = argmax(logits)
            return token_ids, logits.gather(1, token_ids[:, None]).squeeze(1)
        peaks = logits.amax(dim=1)
        keys = to_device(row_keys(self.seeds, positions), self.device)
        if self.groups[0].rows is None:
            return self._draw_group(logits, peaks, keys, self.groups[0]), peaks
        token_ids = torch.empty(len(positions), dtype=torch.int64, device=self.device)
        if self.greedy is not None:
            token_ids[self.greedy] = argmax(logits[self.greedy])
        for group in self.groups:
            rows = group.rows
            token_ids[rows] = self._draw_group(logits[rows], peaks[rows], keys[rows], group)
        return token_ids, peaks

    def _draw_group(
        self, logits: Tensor, peaks: Tensor, keys: Tensor, group: _SampledRows
    ) -> Tensor:
        scaled = (logits - peaks[:, None]).mul_(group.inverse_temperature)
        if group.limits is not None:
            return truncation.draw(scaled, group.limits, keys, self.vocabulary)
        if group.log_min_p is not None:
            scaled.masked_fill_(scaled < group.log_min_p, -torch.inf)
        return race(scaled, keys, self.vocabulary)
