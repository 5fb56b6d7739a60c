"""Sampling parameters of one batch composition: how each row is sampled, and which rows are edited
before.

A batch is built when the composition changes and reused until the next change. Rows are rows of the
logits; a sequence with drafts has several.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenmill_worker.engines.own.sampling.draws import PreparedSampling, SamplingBackend
from tokenmill_worker.engines.own.sampling.logprobs import LogprobBatch
from tokenmill_worker.engines.own.sampling.parameter_table import (
    EDITED,
    NUMBERS,
    READING,
    ParameterTable,
    ParamFlags,
)
from tokenmill_worker.engines.own.sampling.transfer import Indices, to_device


@dataclass(frozen=True, slots=True)
class Bias:
    """Logit biases as coordinates and values."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of one composition; tensors are on the device, arrays on the host."""

    row_slots: Indices  # [rows]: each row's index in the parameter table
    prepared: PreparedSampling
    is_edited: bool
    bias: Bias | None
    penalised: Indices  # rows with a penalty
    penalties: Tensor | None  # [penalised, 3] float32: presence, frequency, repetition
    with_min_tokens: Indices
    with_rules: Indices
    reading: frozenset[int]  # rows whose edits depend on all tokens before them
    logprobs: LogprobBatch | None  # None: no row asked for log-probabilities


def build(
    table: ParameterTable, row_slots: Indices, backend: SamplingBackend, device: torch.device
) -> SamplingBatch:
    """Gather the rows' parameters."""
    flags = table.flags[row_slots]
    penalised = _where(flags, ParamFlags.PENALISED)
    return SamplingBatch(
        row_slots=row_slots,
        prepared=backend.prepare(table, row_slots),
        is_edited=bool((flags & EDITED).any()),
        bias=_bias(table, row_slots, _where(flags, ParamFlags.BIASED), device),
        penalised=penalised,
        penalties=_penalties(table, row_slots[penalised], device),
        with_min_tokens=_where(flags, ParamFlags.MIN_TOKENS),
        with_rules=_where(flags, ParamFlags.RULES),
        reading=frozenset(_where(flags, READING).tolist()),
        logprobs=LogprobBatch.build(table, row_slots, device),
    )


def _where(flags: npt.NDArray[np.int32], flag: ParamFlags) -> Indices:
    return np.flatnonzero(flags & int(flag))


def _bias(
    table: ParameterTable, row_slots: Indices, rows: Indices, device: torch.device
) -> Bias | None:
    found = [
        (row, *table.bias[slot])
        for row, slot in zip(rows, row_slots[rows], strict=True)
        if slot in table.bias
    ]
    if not found:
        return None
    at = np.concatenate([np.full(len(ids), row, np.int64) for row, ids, _ in found])
    ids = np.concatenate([ids for _, ids, _ in found])
    values = np.concatenate([values for _, _, values in found])
    return Bias(to_device(at, device), to_device(ids, device), to_device(values, device))


def _penalties(table: ParameterTable, slots: Indices, device: torch.device) -> Tensor | None:
    if not len(slots):
        return None
    first = NUMBERS.index("presence")
    return to_device(table.numbers[slots, first : first + 3].astype(np.float32), device)
