"""Gives the positions of a step's tokens to layers that would count them themselves.

Llama 4's layers without rotary embedding scale each query by its position, which they count from
the length of their cache on. A step of the engine passes no such cache, and its tokens belong to
several sequences. In the cache's place stands an object whose "length" makes each count right.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.model.paged_attention import StepHolder

_FAMILIES = {"Llama4TextAttention"}  # classes of attention modules


def adapt(model: nn.Module) -> None:
    """Make these modules take the positions of the engine's steps; other passes stay as they
    are.
    """
    found = [part for part in model.modules() if type(part).__name__ in _FAMILIES]
    if not found:
        return
    holder = StepHolder.attach(model)
    for module in found:
        module.register_forward_pre_hook(partial(_pass_positions, holder), with_kwargs=True)


def _pass_positions(
    holder: StepHolder, _module: nn.Module, arguments: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if holder.step is None or holder.positions is None:
        return None
    return arguments, {**kwargs, "past_key_values": _Positions(holder.positions[0])}


class _Positions:
    """Stands for a cache whose length a layer adds to the indices of its tokens.

    `positions` is `[num_tokens]`, of the step's packed tokens.
    """

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, _layer: int) -> Tensor:
        """Return, for each token, the difference between its position and its index."""
        indices = torch.arange(len(self._positions), device=self._positions.device)
        return self._positions - indices

    def update(self, key: Tensor, value: Tensor, _layer: int) -> tuple[Tensor, Tensor]:
        """Return the step's own keys and values; the attention function stores them."""
        return key, value
