"""Groups the rows of one step by adapter, and adds each group's adapter with two small products.

Rows without an adapter are not touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill_worker.engines.own.lora.files import LowRank
from tokenmill_worker.engines.own.plan import StepPlan
from tokenmill_worker.engines.own.sampling.transfer import upload


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter on the device, in the model's type.

    A site that replaces several layers has their factors in one pair.
    """

    key: str  # name and version
    sites: dict[str, LowRank]


@dataclass(frozen=True, slots=True)
class _AdapterRows:
    adapter: LoadedAdapter
    rows: slice | Tensor  # a run of rows, or int64 [num_rows]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of the step, `count` in all, and the groups of those that have an adapter."""

    groups: tuple[_AdapterRows, ...]
    count: int


class AdapterBatch:
    """Groups of one step: of all packed rows, and of the rows that reach the output head."""

    def __init__(self, everywhere: _Rows, sampled: _Rows, head: str | None) -> None:
        self._everywhere = everywhere
        self._sampled = sampled
        self._head = head

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        adapters: dict[str, LoadedAdapter],
        device: torch.device,
        head: str | None = None,
    ) -> AdapterBatch:
        """Group the rows of a plan.

        Args:
            adapters: by key, those of the plan's sequences.
            head: the site of the output head.
        """
        everywhere = _grouped(
            ((i.sequence.adapter, i.num_tokens) for i in plan.scheduled), adapters, device
        )
        at_head = {key: adapter for key, adapter in adapters.items() if head in adapter.sites}
        rows = (
            (i.sequence.adapter, i.num_scored + (1 + len(i.draft_ids) if i.samples else 0))
            for i in plan.scheduled
        )
        return cls(everywhere, _grouped(rows, at_head, device), head)

    def add(self, site: str, x: Tensor, y: Tensor) -> None:
        """Add the adapters to the products `y` `[num_rows, n]` of `x` `[num_rows, k]`, in place."""
        rows = self._everywhere
        if site == self._head and x.shape[0] != rows.count:
            rows = self._sampled  # with equal counts, every row is sampled
        if x.shape[0] != rows.count:
            raise RuntimeError(
                f"{site} sees {x.shape[0]} rows of the step's {rows.count}: it cannot be adapted"
            )
        for group in rows.groups:
            factors = group.adapter.sites.get(site)
            if factors is None:
                continue
            if isinstance(group.rows, slice):
                y[group.rows].addmm_(x[group.rows] @ factors.a.T, factors.b.T)
            else:
                y.index_add_(
                    0, group.rows, x.index_select(0, group.rows) @ factors.a.T @ factors.b.T
                )


def _grouped(
    rows: Iterable[tuple[str, int]], adapters: dict[str, LoadedAdapter], device: torch.device
) -> _Rows:
    """Group rows, given as (adapter's key or "", number of rows) in the order of the step."""
    runs: dict[str, list[range]] = {}
    start = 0
    for key, count in rows:
        if key in adapters:
            runs.setdefault(key, []).append(range(start, start + count))
        start += count
    return _Rows(
        tuple(_AdapterRows(adapters[key], _places(found, device)) for key, found in runs.items()),
        start,
    )


def _places(runs: list[range], device: torch.device) -> slice | Tensor:
    """Return adjacent runs as one slice: a decode of one adapter's sequences gathers nothing.

    Other runs become row indices.
    """
    if all(after.start == before.stop for before, after in itertools.pairwise(runs)):
        return slice(runs[0].start, runs[-1].stop)
    return upload(torch.tensor([row for run in runs for row in run], dtype=torch.int64), device)
