"""Adapters find the products of replaced modules by the device contract, whatever the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.device import AdaptedProduct, AddRows, adapt_linear
from tokenmill_worker.engines.own.lora.files import AdapterError
from tokenmill_worker.engines.own.lora.sites import AdapterRange, Sites


class JointAttention(nn.Module):
    """Replaces two layers by one product, as a device may do."""

    replaced = ""

    def __init__(self) -> None:
        super().__init__()
        self.joint = nn.Linear(4, 6)
        self.o_proj = nn.Linear(6, 4)

    def products(self) -> list[AdaptedProduct]:
        return [AdaptedProduct("joint", 4, 6, {"q_proj": (0, 4), "k_proj": (4, 2)})]

    def adapt(self, add_to: Callable[[str], AddRows]) -> Callable[[], None]:
        return adapt_linear(self.joint, add_to("joint"))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.joint(x))  # type: ignore[no-any-return]


class WrappedLayer(nn.Module):
    """Holds the layer that it replaces, and runs it part by part while adapters are enabled."""

    replaced = "layer"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"attention": JointAttention()})
        self.calls: list[str] = []

    def products(self) -> list[AdaptedProduct]:
        return []

    def adapt(self, add_to: Callable[[str], AddRows]) -> Callable[[], None]:
        self.calls.append("part by part")
        return lambda: self.calls.append("as one")


@pytest.fixture
def model() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([WrappedLayer()])})


def test_layers_of_a_joint_product_are_ranges_of_it_by_their_original_paths(
    model: nn.Module,
) -> None:
    sites = Sites(model)
    site = "layers.0.attention:joint"
    assert sites.range_of("layers.0.attention.q_proj") == AdapterRange(site, 0, 4, 6, 4)
    assert sites.range_of("layers.0.attention.k_proj") == AdapterRange(site, 4, 2, 6, 4)
    own = "layers.0.attention.o_proj"
    assert sites.range_of(own) == AdapterRange(own, 0, 4, 4, 6)
    with pytest.raises(AdapterError, match="only linear layers can be adapted"):
        sites.range_of("layers.0.attention")


def test_enabled_adapters_see_each_product_once_and_disabled_ones_leave_the_model_as_it_was(
    model: nn.Module,
) -> None:
    (layer,) = model.get_submodule("layers").children()
    assert isinstance(layer, WrappedLayer)
    sites, rows, seen = Sites(model), torch.ones(3, 4), []
    plain = layer.layer["attention"](rows)

    def add(site: str, x: Tensor, y: Tensor) -> None:
        seen.append((site, tuple(x.shape), tuple(y.shape)))
        y += 1

    sites.enable_adapters(add)
    assert layer.calls == ["part by part"]
    assert not torch.equal(layer.layer["attention"](rows), plain)
    assert seen == [
        ("layers.0.attention:joint", (3, 4), (3, 6)),
        ("layers.0.attention.o_proj", (3, 6), (3, 4)),
    ]
    sites.disable_adapters()
    assert layer.calls == ["part by part", "as one"]
    assert torch.equal(layer.layer["attention"](rows), plain)
    assert len(seen) == 2
