"""Stand-ins for a decoder layer, and for a model's whole list of them, that run as one call into the kernels.

They run the layers' own modules, whose parts were swapped already, wherever a step is not one that the kernels
take, or while `is_whole` is off: then whoever put something between the parts sees every one of them run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from worker.engine.model.fused.layer_calls import LayerParts, Scratch
from worker.engine.model.fused.layer_run import LayerRun


class Wholeness:
    """How many layers of a model are not to be run as one call."""

    def __init__(self) -> None:
        self.num_apart = 0


class FusedLayer(nn.Module):
    """`layer` is the original with its parts swapped; what else it has is found through this one too."""

    def __init__(self, layer: nn.Module, parts: LayerParts, scratch: Scratch) -> None:
        super().__init__()
        self.layer = layer
        self.parts = parts
        self._is_whole, self._wholeness = True, Wholeness()
        self._run = LayerRun([parts], scratch)

    @property
    def is_whole(self) -> bool:
        """May it run as one call?"""
        return self._is_whole

    @is_whole.setter
    def is_whole(self, value: bool) -> None:
        self._wholeness.num_apart += int(self._is_whole) - int(value)
        self._is_whole = value

    def count_in(self, wholeness: Wholeness) -> None:
        """Tell there, from now on, whether this layer is whole."""
        wholeness.num_apart += not self._is_whole
        self._wholeness = wholeness

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self._run(hidden_states, kwargs) if self.is_whole and not args else None
        return self.layer(hidden_states, *args, **kwargs) if out is None else out


class FusedList(nn.ModuleList):
    """A model's decoder layers, which its own loop gets as one layer: `layers[:n]` is what Transformers runs."""

    def __init__(self, layers: Sequence[FusedLayer], scratch: Scratch) -> None:
        super().__init__(layers)
        self._rows = (FusedRow(layers, scratch),)  # in a tuple: its layers are children of this list already

    @property
    def row(self) -> FusedRow:
        return self._rows[0]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self._rows
        return super().__getitem__(index)


class FusedRow(nn.Module):
    """Layers as one; what else they have in common is found through the first."""

    def __init__(self, layers: Sequence[FusedLayer], scratch: Scratch) -> None:
        super().__init__()
        self._layers = tuple(layers)
        self._wholeness = Wholeness()
        for layer in layers:
            layer.count_in(self._wholeness)
        self.scratch = scratch
        self._run = LayerRun(self.parts, scratch)

    @property
    def parts(self) -> list[LayerParts]:
        return [layer.parts for layer in self._layers]

    @property
    def is_whole(self) -> bool:
        return self._wholeness.num_apart == 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layers"][0], name)

    def at_once(self, hidden_states: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
        """None where the layers have to be called one by one."""
        return self._run(hidden_states, kwargs) if self.is_whole else None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = None if args else self.at_once(hidden_states, kwargs)
        if out is not None:
            return out
        for layer in self._layers:
            hidden_states = layer(hidden_states, *args, **kwargs)
        return hidden_states
