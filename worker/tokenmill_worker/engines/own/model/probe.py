"""Records in one pass how each layer of a loaded model calls the attention function, and with which
mask.

The pass runs before any module of the model is replaced. The attention function returns zeros. The
mask function returns a tensor filled with a code of the requested mask. So no family's
configuration has to be interpreted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.config.cache import Window, first_visible
from tokenmill_worker.engines.own.model.own_attention import attends_by_itself
from tokenmill_worker.engines.own.model.paged_attention import (
    CAUSAL,
    IMPLEMENTATION,
    Probe,
    StepHolder,
    StepNotPassedError,
    mask_code_of,
    paged_attention,
)

PROBING = "tokenmill_probe"
OWN = "eager"  # each family's own attention
# code of any other mask; no mask made by a model is filled with such a code or with `CAUSAL`
_OTHER = 1.0
_ROW_TOLERANCE = 1e-3


def register() -> None:
    """Register the recording implementation with Transformers; calling it again changes nothing."""
    AttentionInterface.register(PROBING, _recording_attention)
    AttentionMaskInterface.register(PROBING, _coded_mask)


@contextmanager
def attending_with(model: Any, implementation: str, name: str) -> Iterator[None]:
    """Make the model's layers call another attention function within the context.

    Raises EngineConfigError where it cannot be chosen.
    """
    attend_with(model, implementation, name)
    try:
        yield
    finally:
        attend_with(model, IMPLEMENTATION, name)


def attend_with(model: Any, implementation: str, name: str) -> None:
    """Set the model's attention function; raises EngineConfigError where it cannot be chosen."""
    if attends_by_itself(model):
        return
    if not model._can_set_attn_implementation():
        raise EngineConfigError([
            f"{name} cannot be served: {type(model).__name__} does not go through Transformers' "
            "AttentionInterface"
        ])  # fmt: skip
    model.set_attn_implementation(implementation)


def probe_layers(model: Any, name: str) -> Probe:
    """Record a pass; raises EngineConfigError for a model whose forward pass fails when called as
    in the engine.
    """
    register()
    with attending_with(model, PROBING, name):
        try:
            probe = _record(model, [0, 1])
        except StepNotPassedError:  # some layers do not pass keyword arguments on: use a holder
            StepHolder.attach(model)
            probe = _run(lambda: _record(model, [0, 1]), name)
        except Exception as error:
            raise failed(name, error) from error
    return probe


def check_positions(model: Any, name: str) -> None:
    """Check that equal tokens at equal positions are equal rows everywhere; raises
    EngineConfigError.
    """
    probe = _run(lambda: _record(model, [1, 1, 1], keep_rows=True), name)
    if any(_differ(rows) for rows in probe.rows or ()):
        reason = (
            "takes no position_ids"
            if "position_ids" not in inspect.signature(model.forward).parameters
            else ""
        )
        raise EngineConfigError([
            f"{name} cannot be served: its forward {reason or 'does not go by position_ids'}, "
            "so it would count positions over all sequences of a step"
        ])  # fmt: skip


def failed(name: str, error: BaseException) -> EngineConfigError:
    """Return an error whose one sentence describes a pass that raised."""
    first = " ".join(str(error).split())[:160]
    return EngineConfigError([
        f"{name} cannot be served: its forward pass fails in a step of packed tokens "
        f"({type(error).__name__}: {first})"
    ])  # fmt: skip


def _run(call: Callable[[], Probe], name: str) -> Probe:
    try:
        return call()
    except Exception as error:
        raise failed(name, error) from error


@torch.inference_mode()
def _record(model: Any, positions: list[int], keep_rows: bool = False) -> Probe:
    probe = Probe(rows=[] if keep_rows else None)
    device = next(model.parameters()).device
    tokens = torch.ones(1, len(positions), dtype=torch.int64, device=device)
    model(
        input_ids=tokens,
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        paged=probe,
    )
    return probe


def _differ(rows: Tensor) -> bool:
    """Return whether rows of equal tokens differ.

    `rows` are queries, keys or values `[num_tokens, heads, head_dim]`.
    """
    bound = _ROW_TOLERANCE * rows.abs().amax().clamp_min(1e-6)
    return bool(((rows - rows[:1]).abs() > bound).any())


# ── masks ──


def _recording_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    kwargs["mask_code"] = mask_code(module, attention_mask)
    return paged_attention(module, query, key, value, None, *args, **kwargs)


def mask_code(module: nn.Module, mask: Tensor | None) -> float | None:
    """Return the code of the mask that a layer was given, or None for a mask that the model made
    itself.
    """
    if mask is None:
        return CAUSAL if getattr(module, "is_causal", True) else _OTHER
    code = float(mask.flatten()[0])
    if (
        not mask.is_floating_point()
        or code == 0.0
        or not bool((mask == code).all())
        or code != int(code)
    ):
        return None
    return code if code >= -(2**24) else None


def is_served(code: float) -> bool:
    """Return whether it is a causal mask, with or without a window, chunked or not."""
    return code < 0


def window_of(code: float) -> Window | None:
    """Return the window of a served mask, or None if a query sees all tokens up to its own."""
    size, is_chunked = divmod(int(CAUSAL - code), 2)
    return Window(size, bool(is_chunked)) if size else None


def _coded_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return a tensor of the mask's shape that holds its code in place of a mask."""
    device = torch.device(kwargs.get("device", "cpu"))
    kinds = [None] if local_size is None else [Window(local_size), Window(local_size, True)]
    served = (k for k in kinds if _has_form(mask_function, k, q_length, device))
    code = next(map(mask_code_of, served), _OTHER)
    return torch.full((batch_size, 1, q_length, kv_length), code, device=device)


def _has_form(
    mask_function: Any, window: Window | None, num_tokens: int, device: torch.device
) -> bool:
    """Return whether the mask lets a query see the positions from the window's first to its own.

    The function gets positions on the model's device, where it may have tensors of its own.
    """
    length = 3 if window is None else window.size
    queries = torch.tensor([0, 1, length - 1, length, length + 1, 2 * length])[:, None]
    keys = torch.arange(2 * length + 2)[None]
    try:
        visible = mask_function(0, 0, queries.to(device), keys.to(device))
    except IndexError:  # it reads the pass's own tokens: test only those
        queries, keys = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
        visible = mask_function(0, 0, queries.to(device), keys.to(device))
    firsts = [first_visible(query, window) for query in queries.flatten().tolist()]
    wanted = (keys <= queries) & (keys >= torch.tensor(firsts)[:, None])
    return bool((torch.as_tensor(visible).cpu().expand(wanted.shape) == wanted).all())
