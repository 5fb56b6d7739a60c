"""Finds where adapters act in a running model: at each linear product, also of a replaced layer.

Layers are identified by their paths in the model as Transformers builds it; an adapter's file uses
these names. A replacement may hold several of them (queries, keys and values in one product). A
site is one product, and each layer is a range of its outputs.

While a step has rows with adapters, each product goes through an object that adds the rows'
adapters. For all other steps the model is unchanged and costs no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from tokenmill_worker.engines.own.device import AdaptedProducts, adapt_linear
from tokenmill_worker.engines.own.lora.files import AdapterError
from tokenmill_worker.engines.own.model.replacement import linear_weight

Add = Callable[[str, Tensor, Tensor], None]  # (site, rows [m, k], products [m, n]): adds in place


@dataclass(frozen=True, slots=True)
class AdapterRange:
    """One layer's range of a site's outputs."""

    site: str
    start: int
    size: int
    site_size: int
    in_features: int


class Sites:
    """All places of a model where adapters act; built once, after modules were replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._ranges: dict[str, AdapterRange] = {}
        self._linears: list[tuple[str, nn.Module]] = []
        self._replaced: list[tuple[str, AdaptedProducts]] = []
        self._undo: list[Callable[[], None]] = []
        self._all_paths: set[str] = set()
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self.head: str | None = None  # the only site that gets just the sampled rows
        wrapped = [
            f"{name}.{module.replaced}"
            for name, module in model.named_modules()
            if isinstance(module, AdaptedProducts) and module.replaced
        ]
        noted: set[object] = set()
        for name, module in model.named_modules():
            path = _original_path(name, wrapped)
            self._all_paths.add(path)
            if ".experts." not in f".{path}." and module not in noted:
                noted |= self._note(path, module)
            if module is head and path in self._ranges:
                self.head = self._ranges[path].site

    def range_of(self, path: str) -> AdapterRange:
        """Return a layer's range; raises AdapterError with the reason why it cannot be adapted."""
        found = self._ranges.get(path)
        if found is not None:
            return found
        last = path.rpartition(".")[2]
        if path in self._all_paths:
            raise AdapterError(f"it adapts {path}, and only linear layers can be adapted")
        if ".experts." in path:
            raise AdapterError(f"it adapts {path}: experts cannot be adapted")
        raise AdapterError(f"it adapts {path}, and this model has no such layer {last!r} there")

    @property
    def are_enabled(self) -> bool:
        return bool(self._undo)

    def enable_adapters(self, add: Add) -> None:
        """Send every product through `add` from now on."""
        for path, module in self._replaced:
            self._undo.append(module.adapt(_adds_below(path, add)))
        for site, linear in self._linears:
            self._undo.append(adapt_linear(linear, partial(add, site)))

    def disable_adapters(self) -> None:
        """Restore the model to its state before `enable_adapters`."""
        while self._undo:
            self._undo.pop()()

    def _note(self, path: str, module: nn.Module) -> set[object]:
        """Note where adapters act in a module; return its products, which are noted with it."""
        if isinstance(module, AdaptedProducts):
            self._replaced.append((path, module))
            for name, inputs, outputs, layers in module.products():
                site = _site(path, name)
                for layer, (start, size) in layers.items():
                    self._ranges[f"{path}.{layer}".rstrip(".")] = AdapterRange(
                        site, start, size, outputs, inputs
                    )
            return {getattr(module, product.name) for product in module.products()}
        if (weight := linear_weight(module)) is not None:
            outputs, inputs = weight.shape
            self._ranges[path] = AdapterRange(path, 0, outputs, outputs, inputs)
            self._linears.append((path, module))
        return set()


def _site(path: str, product: str) -> str:
    return f"{path}:{product}"


def _adds_below(path: str, add: Add) -> Callable[[str], Callable[[Tensor, Tensor], None]]:
    return lambda product: partial(add, _site(path, product))


def _original_path(name: str, wrapped: list[str]) -> str:
    """Return a module's path before layers were replaced, which puts a layer one step deeper."""
    for prefix in wrapped:
        if name == prefix or name.startswith(prefix + "."):
            outer, _, inner = prefix.rpartition(".")
            return outer + name[len(outer) + 1 + len(inner) :]
    return name
