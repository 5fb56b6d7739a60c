"""Replacements for a decoder layer, and for all layers of a model, that run as one kernel call.

They run the layers' own modules, whose parts were replaced already, where the kernels do not
support a step, or while `can_fuse` is off. Then code that was inserted between the parts runs as
well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from tokenmill_worker.engines.own.cpu.fused.layer_calls import LayerParts, Scratch
from tokenmill_worker.engines.own.cpu.fused.layer_run import LayerRun
from tokenmill_worker.engines.own.device import AdaptedProduct, AddRows


class FusionSwitch:
    """Counts the layers of a model that must not run as one call."""

    def __init__(self) -> None:
        self.num_apart = 0


class FusedLayer(nn.Module):
    """A decoder layer that runs as one kernel call.

    `layer` is the original with its parts replaced; its other attributes are available here too.
    Adapters act in its parts.
    """

    replaced = "layer"

    def __init__(self, layer: nn.Module, parts: LayerParts, scratch: Scratch) -> None:
        super().__init__()
        self.layer = layer
        self.parts = parts
        self._can_fuse, self._switch = True, FusionSwitch()
        self._run = LayerRun([parts], scratch)

    @property
    def can_fuse(self) -> bool:
        """Return whether the layer may run as one call."""
        return self._can_fuse

    @can_fuse.setter
    def can_fuse(self, value: bool) -> None:
        self._switch.num_apart += int(self._can_fuse) - int(value)
        self._can_fuse = value

    def products(self) -> tuple[AdaptedProduct, ...]:
        return ()

    def adapt(self, add_to: Callable[[str], AddRows]) -> Callable[[], None]:
        """Run the parts one by one until the returned function is called."""
        undo = partial(setattr, self, "can_fuse", self.can_fuse)
        self.can_fuse = False
        return undo

    def count_in(self, switch: FusionSwitch) -> None:
        """Count this layer in `switch` from now on."""
        switch.num_apart += not self._can_fuse
        self._switch = switch

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self._run(hidden_states, kwargs) if self.can_fuse and not args else None
        return self.layer(hidden_states, *args, **kwargs) if out is None else out


class FusedStack(nn.Module):
    """All layers as one module; other attributes are those of the first layer."""

    def __init__(self, layers: Sequence[FusedLayer], scratch: Scratch) -> None:
        super().__init__()
        self._layers = tuple(layers)
        self._switch = FusionSwitch()
        for layer in layers:
            layer.count_in(self._switch)
        self.scratch = scratch
        self._run = LayerRun(self.parts, scratch)

    @property
    def parts(self) -> list[LayerParts]:
        return [layer.parts for layer in self._layers]

    @property
    def can_fuse(self) -> bool:
        return self._switch.num_apart == 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layers"][0], name)

    def run_fused(self, hidden_states: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Run all layers as one call; return None where they have to be called one by one."""
        return self._run(hidden_states, kwargs) if self.can_fuse else None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = None if args else self.run_fused(hidden_states, kwargs)
        if out is not None:
            return out
        for layer in self._layers:
            hidden_states = layer(hidden_states, *args, **kwargs)
        return hidden_states
