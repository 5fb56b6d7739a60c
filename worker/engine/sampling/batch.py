"""One composition of a batch: which rows are drawn how, with their parameters as device tensors.

Built when the composition changes and reused until the next change. Rows are rows of the logits; with
drafts a sequence has several. It knows no logits and no positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.engine.kernels.draw import Drawing
from worker.engine.sampling.rows import COUNTS, EDITED, NUMBERS, RowTable, Trait
from worker.engine.sampling.truncation import Limits

Indices = npt.NDArray[np.int64]


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy without waiting for the device: a copy from pageable memory would."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are drawn with noise. `rows` is None when it is every row of the batch."""

    rows: Tensor | None
    inverse_temperature: Tensor  # [rows, 1] float32
    log_min_p: Tensor | None  # [rows, 1]; None: no row has a min-p
    limits: Limits | None  # None: neither top-k nor top-p


@dataclass(frozen=True, slots=True)
class Bias:
    """Logit biases as coordinates."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """`seeds` and the index arrays without a device are the host's; the others are on the device."""

    num_rows: int
    row_slots: Indices  # the row of the parameter table, per row of the logits
    seeds: npt.NDArray[np.uint64]
    greedy: Tensor | None  # rows; None where `groups` covers all, or where all are greedy
    all_greedy: bool
    groups: tuple[Group, ...]
    drawing: Drawing
    is_edited: bool
    bias: Bias | None
    penalised: Indices  # rows, on the host
    penalties: Tensor | None  # [penalised, 3] float32: presence, frequency, repetition
    with_min_tokens: Indices
    with_logprobs: Indices
    logprob_rows: Tensor | None  # None where no row or every row has log-probabilities
    max_top_logprobs: int


def build(table: RowTable, row_slots: Indices, device: torch.device) -> Batch:
    """Gather the rows' parameters; the only place that copies them to the device."""
    traits = table.traits[row_slots]
    greedy = (traits & Trait.GREEDY) != 0
    truncated = (traits & Trait.TRUNCATED) != 0
    penalised = _where(traits, Trait.PENALISED)
    with_logprobs = _where(traits, Trait.LOGPROBS)
    plain = np.flatnonzero(~greedy & ~truncated)
    groups = [_group(table, row_slots, rows, device) for rows in (plain, np.flatnonzero(truncated)) if len(rows)]
    some_logprobs = 0 < len(with_logprobs) < len(row_slots)
    return Batch(
        num_rows=len(row_slots),
        row_slots=row_slots,
        seeds=table.seeds[row_slots],
        greedy=to_device(np.flatnonzero(greedy), device) if greedy.any() and groups else None,
        all_greedy=not groups,
        groups=tuple(groups),
        drawing=_drawing(table, row_slots, greedy),
        is_edited=bool((traits & EDITED).any()),
        bias=_bias(table, row_slots, _where(traits, Trait.BIASED), device),
        penalised=penalised,
        penalties=_penalties(table, row_slots[penalised], device),
        with_min_tokens=_where(traits, Trait.MIN_TOKENS),
        with_logprobs=with_logprobs,
        logprob_rows=to_device(with_logprobs, device) if some_logprobs else None,
        max_top_logprobs=int(table.counts[row_slots, COUNTS.index("num_top_logprobs")].max(initial=0)),
    )


def _drawing(table: RowTable, slots: Indices, greedy: npt.NDArray[np.bool_]) -> Drawing:
    numbers = table.numbers[slots]
    temperature = numbers[:, NUMBERS.index("temperature")]
    return Drawing(
        inverse_temperature=np.where(greedy, 0.0, 1.0 / np.where(greedy, 1.0, temperature)).astype(np.float32),
        log_min_p=numbers[:, NUMBERS.index("log_min_p")].astype(np.float32),
        top_p=np.ascontiguousarray(numbers[:, NUMBERS.index("top_p")]),
        top_k=np.ascontiguousarray(table.counts[slots, COUNTS.index("top_k")]),
    )


def _where(traits: npt.NDArray[np.int32], trait: Trait) -> Indices:
    return np.flatnonzero(traits & int(trait))


def _group(table: RowTable, row_slots: Indices, rows: Indices, device: torch.device) -> Group:
    slots = row_slots[rows]
    numbers = table.numbers[slots]
    log_min_p = numbers[:, NUMBERS.index("log_min_p"), None].astype(np.float32)
    min_p = to_device(log_min_p, device) if np.isfinite(log_min_p).any() else None
    return Group(
        rows=None if len(rows) == len(row_slots) else to_device(rows, device),
        inverse_temperature=to_device((1.0 / numbers[:, :1]).astype(np.float32), device),
        log_min_p=min_p,
        limits=_limits(table, slots, log_min_p, device) if table.traits[slots[0]] & Trait.TRUNCATED else None,
    )


def _limits(table: RowTable, slots: Indices, log_min_p: npt.NDArray[np.float32], device: torch.device) -> Limits:
    top_k = table.counts[slots, COUNTS.index("top_k")]
    limited = top_k[top_k < table.vocab_size]
    return Limits(
        top_k=to_device(top_k[:, None], device),
        top_p=to_device(table.numbers[slots, NUMBERS.index("top_p"), None], device),
        log_min_p=to_device(log_min_p, device),
        max_top_k=int(limited.max(initial=0)),
        bounded=len(limited) == len(top_k),
    )


def _bias(table: RowTable, row_slots: Indices, rows: Indices, device: torch.device) -> Bias | None:
    found = [(row, *table.bias[slot]) for row, slot in zip(rows, row_slots[rows], strict=True) if slot in table.bias]
    if not found:
        return None
    at = np.concatenate([np.full(len(ids), row, np.int64) for row, ids, _ in found])
    ids = np.concatenate([ids for _, ids, _ in found])
    values = np.concatenate([values for _, _, values in found])
    return Bias(to_device(at, device), to_device(ids, device), to_device(values, device))


def _penalties(table: RowTable, slots: Indices, device: torch.device) -> Tensor | None:
    if not len(slots):
        return None
    first = NUMBERS.index("presence")
    return to_device(table.numbers[slots, first : first + 3].astype(np.float32), device)
