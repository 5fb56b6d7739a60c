"""LoRA adapters at packed weights, whose activation is part of the product's kernel call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tokenmill_worker.engines.own.cpu.kernels.linear import Epilogue, PackedWeight
from tokenmill_worker.engines.own.device import AdaptedProduct, AddRows, LayerRanges

_ACTIVATIONS: Final[dict[Epilogue, Callable[[Tensor], Tensor]]] = {
    Epilogue.SWIGLU: functional.silu,
    Epilogue.GEGLU_TANH: lambda gate: functional.gelu(gate, approximate="tanh"),
}


class PackedProducts:
    """The part of a replacement that adapters use: its packed weights are the products."""

    replaced = ""
    half_panel = 0  # outputs of gate and up alternate in this width; 0: no product is gated

    def layer_ranges(self) -> dict[str, LayerRanges]:
        """Return the layers of each product, by its attribute."""
        raise NotImplementedError

    def products(self) -> Sequence[AdaptedProduct]:
        return [
            AdaptedProduct(name, getattr(self, name).k, getattr(self, name).n, layers)
            for name, layers in self.layer_ranges().items()
        ]

    def adapt(self, add_to: Callable[[str], AddRows]) -> Callable[[], None]:
        weights = {name: getattr(self, name) for name in self.layer_ranges()}
        self.__dict__.update(
            (name, _AdaptedWeight(weight, add_to(name), self.half_panel))
            for name, weight in weights.items()
        )
        return partial(self.__dict__.update, weights)


class _AdaptedWeight:
    """A packed weight that adds the rows' adapters to its products, before activation."""

    def __init__(self, weight: PackedWeight, add: AddRows, half_panel: int) -> None:
        self._weight, self._add, self._half_panel = weight, add, half_panel

    def __call__(self, x: Tensor, epilogue: Epilogue = Epilogue.PLAIN) -> Tensor:
        products = self._weight(x)
        if epilogue is Epilogue.PLAIN:
            self._add(x, products)
            return products
        turns = products.view(x.shape[0], -1, 2, self._half_panel)
        both = torch.cat([turns[:, :, part].reshape(x.shape[0], -1) for part in (0, 1)], dim=1)
        self._add(x, both)
        gate, up = both.chunk(2, dim=1)
        return _ACTIVATIONS[epilogue](gate) * up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weight, name)
