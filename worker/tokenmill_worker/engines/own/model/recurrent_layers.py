"""Serves layers that keep a recurrent state of each sequence in place of keys and values: Mamba,
gated delta networks, short convolutions.

No family is named: a module is recurrent if it updates the states of Transformers' cache. In a step
of the engine it runs through the step; elsewhere it runs as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.model.paged_attention import StepHolder
from tokenmill_worker.engines.own.model.probe import failed
from tokenmill_worker.engines.own.model.recurrent_states import LayerStates

# functions of Transformers' cache that write a state
_UPDATES = {"update_conv_state", "update_recurrent_state"}
_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
# share of a row's range by which Transformers' passes over chunks and over single tokens differ in
# float32: 0.004 in small Mamba-2 models
TOLERANCE = 0.02


def adapt(model: Any, name: str) -> None:
    """Make the recurrent modules of a model run through the engine's steps.

    Raises EngineConfigError for a module that fails when it runs by itself.
    """
    found = [part for part in model.modules() if _is_recurrent(part)]
    if not found or is_recurrent(model):
        return
    holder = StepHolder.attach(model)
    # in the type of the embeddings: a recurrent module may keep some weights in float32
    width = model.config.get_text_config().hidden_size
    rows = torch.randn(1, 4, width, generator=torch.Generator().manual_seed(1))
    rows = rows.to(next(model.parameters()))
    for module in found:
        layer = _RecurrentLayer(module, holder)
        try:
            layer.learn(rows)
        except Exception as error:
            raise failed(name, error) from error
        module.forward = layer.forward
    model.has_recurrent_layers = True


def is_recurrent(model: nn.Module) -> bool:
    """Return whether `adapt` found recurrent layers."""
    return bool(getattr(model, "has_recurrent_layers", False))


def check_settings(config: EngineConfig) -> None:
    """Raise EngineConfigError for settings that a model with recurrent states does not have.

    A state cannot go back by a rejected draft, and is not in the blocks that are offloaded.
    Adapters find their rows by packed tokens, which such a layer takes apart.
    """
    asked = {
        "draft_model": config.draft_model is not None,
        "speculative_tokens": config.speculative_tokens > 0,
        "cpu_offload_gib": config.cpu_offload_gib not in (0, "auto"),
        "adapters": bool(config.adapters),
        "cuda_graphs": bool(config.cuda_graphs),
    }
    found = [name for name, is_set in asked.items() if is_set]
    if found:
        raise EngineConfigError([
            f"{config.model} cannot be served with {', '.join(found)}: some of its layers keep "
            "recurrent states"
        ])  # fmt: skip


def _is_recurrent(module: nn.Module) -> bool:
    """Return whether a function of the module's class updates a state of Transformers' cache."""
    if not isinstance(getattr(module, "layer_idx", None), int):
        return False
    functions = map(inspect.unwrap, filter(inspect.isfunction, vars(type(module)).values()))
    return any(_UPDATES & {*function.__code__.co_names} for function in functions)


class _RecurrentLayer:
    """A recurrent module, and its own forward pass."""

    def __init__(self, module: Any, holder: StepHolder) -> None:
        self._index: int = module.layer_idx
        self._own: Callable[..., Any] = module.forward
        self._holder = holder
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = next(name for name in _CACHE_ARGUMENTS if name in parameters)
        self._reads_state_in_chunks = True

    @torch.inference_mode()
    def learn(self, rows: Tensor) -> None:
        """Find out whether a pass over several tokens reads the recurrent states; Mamba's does not.

        `rows` are hidden states `[1, 4, hidden_size]`.
        """
        first, rest = torch.split(rows, [1, 3], dim=1)
        known = LayerStates()
        self._run(first, known)
        others = {
            key: tensor + 1.0 if key[0] == "recurrent" else tensor
            for key, tensor in known.tensors.items()
        }
        has_recurrent = any(name == "recurrent" for name, _ in others)
        out = self._run(rest, LayerStates(dict(known.tensors)))
        self._reads_state_in_chunks = not (
            has_recurrent and torch.equal(out, self._run(rest, LayerStates(others)))
        )

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        """Run through the step of the model's call, or as the module does where it has none."""
        step = self._holder.step
        if step is None:
            return self._own(*arguments, **kwargs)
        hidden = arguments[0] if arguments else kwargs["hidden_states"]
        return step.recur(self._index, self._run_chunk, hidden)

    def _run_chunk(self, rows: Tensor, states: LayerStates) -> Tensor:
        if self._reads_state_in_chunks or not states.tensors:
            return self._run(rows, states)
        return torch.cat([self._run(row, states) for row in torch.split(rows, 1, dim=1)], dim=1)

    def _run(self, rows: Tensor, states: LayerStates) -> Tensor:
        out = self._own(rows, **{self._cache_argument: states})
        if not isinstance(out, Tensor):  # it attends too
            raise TypeError(f"recurrent layer {self._index} returns more than hidden states")
        return out
