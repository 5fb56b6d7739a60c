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
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenmill_worker.engines.own.cpu.fused.layer import FusedLayer
from tokenmill_worker.engines.own.cpu.fused.modules import FusedAttention, FusedMLP, PackedLinear
from tokenmill_worker.engines.own.cpu.kernels.linear import Epilogue, PackedWeight
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
        # a PackedWeight in an attribute, and half a panel
        self._weights: list[tuple[str, nn.Module, str, int]] = []
        self._products: list[tuple[str, nn.Module]] = []
        self._layers = [module for module in model.modules() if isinstance(module, FusedLayer)]
        self._undo: list[tuple[nn.Module, str, Any]] = []
        self._all_paths: set[str] = set()
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self.head: str | None = None  # the only site that gets just the sampled rows
        wrapped = [
            f"{name}.layer"
            for name, module in model.named_modules()
            if isinstance(module, FusedLayer)
        ]
        for name, module in model.named_modules():
            path = _original_path(name, wrapped)
            self._all_paths.add(path)
            if ".experts." not in f".{path}.":
                self._note(path, module)
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
        for site, module, name, half_panel in self._weights:
            weight = getattr(module, name)
            self._replace(module, name, _AdaptedWeight(weight, site, add, half_panel))
        for site, module in self._products:
            self._replace(module, "forward", _adapted(module.forward, site, add))
        for layer in self._layers:  # a layer as one kernel call adds no adapters; its parts do
            self._undo.append((layer, "can_fuse", layer.can_fuse))
            layer.can_fuse = False

    def disable_adapters(self) -> None:
        """Restore the model to its state before `enable_adapters`."""
        for module, name, original in reversed(self._undo):
            if name == "forward":
                del module.__dict__[name]
            else:
                setattr(module, name, original)
        self._undo.clear()

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        self._undo.append((module, name, getattr(module, name)))
        module.__dict__[name] = value

    # ── finding ──

    def _note(self, path: str, module: nn.Module) -> None:
        if isinstance(module, FusedAttention):
            query, rest = (
                count * module.head_dim for count in (module.num_heads, module.num_kv_heads)
            )
            ranges = {"q_proj": (0, query), "k_proj": (query, rest), "v_proj": (query + rest, rest)}
            self._note_weight(path, module, "qkv", ranges | {"qkv_proj": (0, query + 2 * rest)})
            self._note_weight(path, module, "out", {"o_proj": (0, module.out.n)})
        elif isinstance(module, FusedMLP):
            size = module.down.k
            ranges = {
                "gate_proj": (0, size),
                "up_proj": (size, size),
                "gate_up_proj": (0, 2 * size),
            }
            self._note_weight(path, module, "gate_up", ranges)
            self._note_weight(path, module, "down", {"down_proj": (0, module.down.n)})
        elif isinstance(module, PackedLinear):
            self._note_weight(path, module, "packed", {"": (0, module.out_features)})
        elif (weight := linear_weight(module)) is not None:
            outputs, inputs = weight.shape
            self._ranges[path] = AdapterRange(path, 0, outputs, outputs, inputs)
            self._products.append((path, module))
        elif (joint := getattr(module, "joint_layers", None)) is not None:
            self._note_joint_layers(path, module, joint())

    def _note_joint_layers(
        self, path: str, module: nn.Module, joint: dict[str, dict[str, tuple[int, int]]]
    ) -> None:
        """Note the layers that share a product of a CUDA device's attention or MLP.

        The product itself is noted as the linear layer that it is.
        """
        for name, layers in joint.items():
            product: Any = getattr(module, name)
            for layer, (start, size) in layers.items():
                self._ranges[f"{path}.{layer}"] = AdapterRange(
                    f"{path}.{name}", start, size, product.out_features, product.in_features
                )

    def _note_weight(
        self, path: str, module: nn.Module, name: str, ranges: dict[str, tuple[int, int]]
    ) -> None:
        weight: PackedWeight = getattr(module, name)
        half_panel = module.half_panel if isinstance(module, FusedMLP) and name == "gate_up" else 0
        site = f"{path}:{name}"
        self._weights.append((site, module, name, half_panel))
        for layer, (start, size) in ranges.items():
            self._ranges[f"{path}.{layer}".rstrip(".")] = AdapterRange(
                site, start, size, weight.n, weight.k
            )


def _original_path(name: str, wrapped: list[str]) -> str:
    """Return a module's path before layers were replaced, which puts a layer one step deeper."""
    for prefix in wrapped:
        if name == prefix or name.startswith(prefix + "."):
            return prefix.removesuffix(".layer") + name[len(prefix) :]
    return name


# ── with adapters ──


class _AdaptedWeight:
    """A packed weight that adds the rows' adapters to its products, before activation."""

    def __init__(self, weight: PackedWeight, site: str, add: Add, half_panel: int) -> None:
        self._weight, self._site, self._add, self._half_panel = weight, site, add, half_panel

    def __call__(self, x: Tensor, epilogue: Epilogue = Epilogue.PLAIN) -> Tensor:
        products = self._weight(x)
        if not self._half_panel:
            self._add(self._site, x, products)
            return products
        turns = products.view(x.shape[0], -1, 2, self._half_panel)
        both = torch.cat([turns[:, :, part].reshape(x.shape[0], -1) for part in (0, 1)], dim=1)
        self._add(self._site, x, both)
        gate, up = both.chunk(2, dim=1)
        return _ACTIVATIONS[epilogue](gate) * up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weight, name)


_ACTIVATIONS: Final[dict[Epilogue, Callable[[Tensor], Tensor]]] = {
    Epilogue.SWIGLU: functional.silu,
    Epilogue.GEGLU_TANH: lambda gate: functional.gelu(gate, approximate="tanh"),
}


def _adapted(
    forward: Callable[[Tensor], Tensor], site: str, add: Add
) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = forward(x)
        add(site, x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]))
        return y

    return run
