"""Adapters at fixed addresses, against products with each row's own factors."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill_worker.engines.own.lora.batch import LoadedAdapter
from tokenmill_worker.engines.own.lora.files import LowRank
from tokenmill_worker.engines.own.lora.slots import AdapterSlots, SlottedBatch

WIDTH, OUTPUTS = 6, 5


def adapter(key: str, rank: int, site: str = "one") -> LoadedAdapter:
    torch.manual_seed(sum(map(ord, key)))
    return LoadedAdapter(key, {site: LowRank(torch.randn(rank, WIDTH), torch.randn(OUTPUTS, rank))})


def slots_for(*adapters: LoadedAdapter, count: int = 2) -> AdapterSlots:
    largest = {site: factors for one in adapters for site, factors in one.sites.items()}
    return AdapterSlots(largest, count)


def added(slots: AdapterSlots, x: Tensor, slot_of_row: list[int]) -> Tensor:
    y = torch.zeros(len(x), OUTPUTS)
    rows = torch.arange(len(x))
    SlottedBatch(slots, torch.tensor(slot_of_row), rows, None).add("one", x, y)
    return y


def test_each_row_gets_its_own_adapter_and_rows_without_one_are_unchanged() -> None:
    small, large = adapter("small", 2), adapter("large", 4)
    slots = slots_for(small, large)
    at = slots.place({"small": small, "large": large})
    assert at is not None
    x = torch.randn(4, WIDTH)
    found = added(slots, x, [at["large"], -1, at["small"], at["large"]])
    for row, one in ((0, large), (2, small), (3, large)):
        factors = one.sites["one"]
        torch.testing.assert_close(found[row], x[row] @ factors.a.T @ factors.b.T)
    assert not found[1].any()


def test_an_adapter_replaces_the_least_recently_used_one_in_its_slot() -> None:
    first, second, third = adapter("first", 4), adapter("second", 4), adapter("third", 1)
    slots = AdapterSlots(first.sites, 2)
    before = slots.place({"first": first, "second": second})
    assert before is not None
    assert slots.place({"first": first}) == {"first": before["first"]}
    assert slots.place({"third": third}) == {"third": before["second"]}
    x = torch.randn(1, WIDTH)
    factors = third.sites["one"]
    found = added(slots, x, [before["second"]])
    torch.testing.assert_close(found, x @ factors.a.T @ factors.b.T)


def test_adapters_that_do_not_fit_get_no_slots() -> None:
    known = adapter("known", 2)
    slots = slots_for(known, count=1)
    assert slots.place({"larger": adapter("larger", 3)}) is None
    assert slots.place({"elsewhere": adapter("elsewhere", 2, site="two")}) is None
    assert slots.place({"known": known, "again": adapter("again", 1)}) is None
    assert slots.place({"known": known}) == {"known": 0}


def test_an_overflowing_adapter_does_not_affect_other_rows() -> None:
    calm, wild = adapter("calm", 2), adapter("wild", 2)
    wild.sites["one"].a.fill_(3e38)
    slots = slots_for(calm)
    at = slots.place({"calm": calm, "wild": wild})
    assert at is not None
    found = added(slots, torch.ones(3, WIDTH), [at["calm"], at["wild"], -1])
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()
    assert not found[2].any()


def test_an_adapted_head_gets_the_sampled_rows() -> None:
    one = adapter("one", 2, site="head")
    slots = slots_for(one)
    at = slots.place({"one": one})
    assert at is not None
    batch = SlottedBatch(slots, torch.tensor([-1, at["one"], -1]), torch.tensor([1, 2]), "head")
    x, y = torch.randn(2, WIDTH), torch.zeros(2, OUTPUTS)
    batch.add("head", x, y)
    assert y[0].any()
    assert not y[1].any()


def test_a_step_that_samples_nothing_has_no_rows_at_the_head() -> None:
    one = adapter("one", 2, site="head")
    batch = SlottedBatch(slots_for(one), torch.tensor([0]), torch.empty(0).long(), "head")
    batch.add("head", torch.empty(0, WIDTH), torch.empty(0, OUTPUTS))
