"""Keeps the adapters of a step at fixed addresses, so that a CUDA graph may add them.

A slot holds one adapter's factors. Each product is multiplied with the factors of all slots at
once, and a row keeps only the part of its own adapter. Two small products with few columns cost
less than reading each row's factors, and the shapes do not depend on the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill_worker.engines.own.lora.batch import LoadedAdapter
from tokenmill_worker.engines.own.lora.files import LowRank


class AdapterSlots:
    """`count` slots, each with room for factors of the shapes of `largest`, by site."""

    def __init__(self, largest: Mapping[str, LowRank], count: int) -> None:
        # by site: [slots, rank, in_features] and [slots, rank, out_features]
        self._factors = {
            site: (
                factors.a.new_zeros(count, *factors.a.shape),
                factors.b.new_zeros(count, *factors.b.T.shape),
            )
            for site, factors in largest.items()
        }
        self.count = count
        self._free = list(range(count))
        self._held: OrderedDict[str, int] = OrderedDict()  # key → slot, least recently used first

    def place(self, adapters: dict[str, LoadedAdapter]) -> dict[str, int] | None:
        """Return the slots of these adapters, by key; None where they do not fit.

        An adapter without a slot takes that of the least recently used one.
        """
        if len(adapters) > self.count or not all(map(self._fits, adapters.values())):
            return None
        for key in adapters.keys() & self._held.keys():
            self._held.move_to_end(key)
        for key in adapters.keys() - self._held.keys():
            slot = self._free.pop() if self._free else self._held.popitem(last=False)[1]
            self._fill(slot, adapters[key])
            self._held[key] = slot
        return {key: self._held[key] for key in adapters}

    def _fits(self, adapter: LoadedAdapter) -> bool:
        """Return whether there is room; a version loaded later may be larger than those before."""
        return all(
            site in self._factors and len(factors.a) <= self._factors[site][0].shape[1]
            for site, factors in adapter.sites.items()
        )

    def _fill(self, slot: int, adapter: LoadedAdapter) -> None:
        torch._foreach_zero_([part[slot] for pair in self._factors.values() for part in pair])
        targets, sources = [], []
        for site, factors in adapter.sites.items():
            a, b = self._factors[site]
            rank = len(factors.a)
            targets += [a[slot, :rank], b[slot, :rank]]
            sources += [factors.a, factors.b.T]
        torch._foreach_copy_(targets, sources)

    def add(self, site: str, x: Tensor, y: Tensor, is_other: Tensor) -> None:
        """Add each row's adapter to the products `y` `[num_rows, n]` of `x` `[num_rows, k]`.

        `is_other` `[num_rows, slots]` is false where a slot holds the row's adapter. What other
        adapters make of a row is dropped before the second product, even if it is not finite.
        """
        if site not in self._factors:
            return
        a, b = self._factors[site]  # [slots, rank, in_features], [slots, rank, out_features]
        narrow = x @ a.flatten(0, 1).T
        narrow.view(len(x), *a.shape[:2]).masked_fill_(is_other[:, :, None], 0.0)
        y.addmm_(narrow, b.flatten(0, 1))


class SlottedBatch:
    """The rows of one step, each with its adapter's slot."""

    def __init__(
        self, slots: AdapterSlots, slot_of_row: Tensor, sampled: Tensor, head: str | None
    ) -> None:
        """Prepare a step.

        Args:
            slots: the adapters.
            slot_of_row: int64 `[num_tokens]`; −1: the row has no adapter.
            sampled: int64 `[num_rows]`: the rows that reach the output head.
            head: the site of the output head.
        """
        numbers = torch.arange(slots.count, device=slot_of_row.device)
        self._slots = slots
        self._is_other = slot_of_row[:, None] != numbers
        self._sampled, self._head = sampled, head

    def add(self, site: str, x: Tensor, y: Tensor) -> None:
        """Add the adapters to the products `y` of `x`, in place."""
        is_other = self._is_other
        if site == self._head and len(x) != len(is_other):
            is_other = is_other.index_select(0, self._sampled)
        if len(x) != len(is_other):
            raise RuntimeError(
                f"{site} sees {len(x)} rows of the step's {len(is_other)}: it cannot be adapted"
            )
        self._slots.add(site, x, y, is_other)
