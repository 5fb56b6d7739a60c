"""What the rows of one step ask for: rows grouped by adapter, each group added with two small products.

Rows without an adapter are not touched. It knows neither files nor the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.model.lora.files import LowRank
from worker.engine.plan import StepPlan


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """On the device, in the model's type. A site that stands in for several layers has their factors in one pair."""

    key: str  # name and version
    sites: dict[str, LowRank]


@dataclass(frozen=True, slots=True)
class _Group:
    adapter: LoadedAdapter
    rows: slice | Tensor  # a run of rows, or int64 [num_rows]


class AdapterBatch:
    """One step's groups; `num_rows` counts all packed rows, those without an adapter included."""

    def __init__(self, groups: Iterable[_Group], num_rows: int) -> None:
        self._groups = tuple(groups)
        self._num_rows = num_rows

    @classmethod
    def of(cls, plan: StepPlan, adapters: dict[str, LoadedAdapter], device: torch.device) -> AdapterBatch:
        """`adapters` by key: those of the plan's sequences."""
        runs: dict[str, list[range]] = {}
        start = 0
        for item in plan.scheduled:
            key = item.sequence.adapter
            if key:
                runs.setdefault(key, []).append(range(start, start + item.num_tokens))
            start += item.num_tokens
        groups = [_Group(adapters[key], _rows(found, device)) for key, found in runs.items()]
        return cls(groups, start)

    def add(self, site: str, x: Tensor, y: Tensor) -> None:
        """To the products `y` `[num_rows, n]` of the rows `x` `[num_rows, k]`, in place."""
        if x.shape[0] != self._num_rows:
            raise RuntimeError(f"{site} sees {x.shape[0]} rows of the step's {self._num_rows}: it cannot be adapted")
        for group in self._groups:
            factors = group.adapter.sites.get(site)
            if factors is None:
                continue
            if isinstance(group.rows, slice):
                y[group.rows].addmm_(x[group.rows] @ factors.a.T, factors.b.T)
            else:
                y.index_add_(0, group.rows, x.index_select(0, group.rows) @ factors.a.T @ factors.b.T)


def _rows(runs: list[range], device: torch.device) -> slice | Tensor:
    """Neighbours become one run: a decode of one adapter's sequences needs no gathering."""
    if all(after.start == before.stop for before, after in itertools.pairwise(runs)):
        return slice(runs[0].start, runs[-1].stop)
    rows = torch.tensor([row for run in runs for row in run], dtype=torch.int64, pin_memory=device.type == "cuda")
    return rows.to(device, non_blocking=True)
