"""top-k, top-p and min-p as one number per row: the floor that a scaled logit must reach to stay.

All three keep the most likely tokens, so each is a threshold. Equal logits stay or go together, so
the result does not depend on any sort order. min-p is applied first, then top-k, then top-p over
the rest, renormalised. Scaled logits have their row's maximum at 0.

Rows are sorted as far as their parameters require, with no test that would wait for a device. The
kernels of the devices are tested against this code, and it samples where there is no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill_worker.engines.own.sampling.noise import race

_MAX_ELEMENTS = 1 << 22  # rows are sorted in chunks of this size: a bound on scratch memory


@dataclass(frozen=True, slots=True)
class TruncationLimits:
    """Truncation parameters of each row, on the device.

    `max_top_k` is the largest top-k (0: none); `bounded` says that each row has one.
    """

    top_k: Tensor  # [rows, 1] int64, the vocabulary's size where off
    top_p: Tensor  # [rows, 1] float64
    log_min_p: Tensor  # [rows, 1] float32, −inf where off
    max_top_k: int
    bounded: bool

    def take(self, rows: Tensor | slice) -> TruncationLimits:
        return TruncationLimits(
            self.top_k[rows], self.top_p[rows], self.log_min_p[rows], self.max_top_k, self.bounded
        )


def draw(scaled: Tensor, limits: TruncationLimits, keys: Tensor, vocabulary: Tensor) -> Tensor:
    """Sample one token id per row.

    `scaled` is [rows, vocab]; `vocabulary` is arange(vocab), int32.
    """
    return draw_sorted_in_chunks(scaled, limits, keys, vocabulary, _MAX_ELEMENTS)


def draw_sorted_in_chunks(
    scaled: Tensor, limits: TruncationLimits, keys: Tensor, vocabulary: Tensor, max_elements: int
) -> Tensor:
    return torch.cat(
        [
            draw_sorted(scaled[part], limits.take(part), keys[part], vocabulary)
            for part in _chunks(scaled, max_elements)
        ]
    )


def draw_sorted(
    scaled: Tensor, limits: TruncationLimits, keys: Tensor, vocabulary: Tensor
) -> Tensor:
    floor = _sorted_floor(scaled, limits)
    return race(scaled.masked_fill(scaled < floor, -torch.inf), keys, vocabulary)


def floors(scaled: Tensor, limits: TruncationLimits) -> Tensor:
    """Return each row's floor [rows, 1]; `scaled` is [rows, vocab]."""
    parts = _chunks(scaled, _MAX_ELEMENTS)
    return torch.cat([_sorted_floor(scaled[part], limits.take(part)) for part in parts])


def _chunks(scaled: Tensor, max_elements: int) -> list[slice]:
    step = max(1, max_elements // scaled.shape[1])
    return [slice(first, first + step) for first in range(0, scaled.shape[0], step)]


def _sorted_floor(scaled: Tensor, limits: TruncationLimits) -> Tensor:
    count = min(limits.max_top_k, scaled.shape[1]) if limits.bounded else scaled.shape[1]
    if count == scaled.shape[1]:
        values = scaled.sort(dim=-1, descending=True).values
    else:
        values = scaled.topk(count, dim=-1).values
    return find_floor(values, scaled, limits)


def find_floor(values: Tensor, scaled: Tensor, limits: TruncationLimits) -> Tensor:
    """Find the floor per row [rows, 1] from the row's highest values in descending order [rows,
    count].

    The floor is exact if it is above the last of the values, or if they are the whole row; the
    caller checks that.
    """
    count = values.shape[1]
    kth = values.gather(1, (limits.top_k - 1).clamp(max=count - 1))
    kth = kth.masked_fill(limits.top_k >= scaled.shape[1], -torch.inf)
    floor = torch.maximum(kth, limits.log_min_p)
    kept = values.exp().masked_fill(values < floor, 0.0)
    reached = kept.cumsum(dim=1, dtype=torch.float64)
    total = reached[:, -1:]
    if count < scaled.shape[1]:
        total = _total(scaled, floor, values, total)
    below = (reached < limits.top_p * total).sum(dim=1, keepdim=True)
    nucleus = values.gather(1, below.clamp(max=count - 1))
    nucleus = nucleus.masked_fill(limits.top_p >= 1.0, -torch.inf)
    return torch.maximum(floor, nucleus)


def _total(scaled: Tensor, floor: Tensor, values: Tensor, total: Tensor) -> Tensor:
    """Return the mass at or above the floor.

    It is summed over the candidates, or over the row where the candidates do not reach down to the
    floor.
    """
    inside = values[:, -1:] < floor
    whole = (
        scaled.exp().masked_fill_(scaled < floor, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64)
    )
    return torch.where(inside, total, whole)
