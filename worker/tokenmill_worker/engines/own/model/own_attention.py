"""Serves families whose attention modules compute their scores themselves.

These modules do not call Transformers' AttentionInterface. During a step of the engine they project
their queries, keys and values as before and then attend through the step. Any other call of the
model runs their own code, which the engine's logits are compared with.

ALiBi (arXiv 2108.12409) adds `slope · position of the key` to a score. Two more dimensions of a
head do this without a kernel of its own: a key carries its bias there, split in two numbers so that
16 bits hold it, and each query carries the factor that undoes the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.model.paged_attention import StepHolder, mask_code_of

_BIAS_DIMENSIONS = 8  # two are used; attention kernels take head sizes that are multiples of 8

# (module, its own function, the holder, *arguments of the function) → what the function returns
Replacement = Callable[..., Any]


def adapt(model: nn.Module) -> None:
    """Make the attention modules of the families below attend through the engine's steps."""
    found = [part for part in model.modules() if type(part).__name__ in _FAMILIES]
    if not found:
        return
    for module in found:
        if not hasattr(module, "layer_idx"):
            module.layer_idx = module.layer_id
    holder = StepHolder.attach(model)
    for module in found:
        name, replacement = _FAMILIES[type(module).__name__]
        if name == "forward" and hasattr(module, "config"):
            # Falcon's eager code adds ALiBi's bias twice, its code for torch's attention once
            module.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
        own = getattr(module, name)
        setattr(module, name, partial(_call, replacement, module, own, holder))
    model.attends_by_itself = True  # type: ignore[assignment]


def attends_by_itself(model: nn.Module) -> bool:
    """Return whether `adapt` changed the model: its attention function cannot be chosen."""
    return bool(getattr(model, "attends_by_itself", False))


def has_biases(model: nn.Module) -> bool:
    """Return whether keys of the model, which a step has run, carry ALiBi's biases."""
    holders = (getattr(module, "step_holder", None) for module in model.modules())
    return any(holder.has_biases for holder in holders if holder is not None)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slopes `[num_heads]` of ALiBi: powers of `2^(-8/n)` for n heads, n a power of two.

    Further heads have the odd powers of that series for 2n heads.
    """
    count = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * power / count) for power in range(1, count + 1)]
    more = [2.0 ** (-4 * power / count) for power in range(1, 2 * count, 2)]
    return torch.tensor([*first, *more[: num_heads - count]])


def _call(
    replacement: Replacement,
    module: nn.Module,
    own: Callable[..., Any],
    holder: StepHolder,
    *arguments: Any,
    **kwargs: Any,
) -> Any:
    if holder.step is None:
        return own(*arguments, **kwargs)
    return replacement(module, holder, *arguments, **kwargs)


def _attend(
    module: nn.Module,
    holder: StepHolder,
    states: tuple[Tensor, Tensor, Tensor],
    scale: float,
    bias: Tensor | None = None,
    window: Window | None = None,
) -> Tensor:
    """Attend through the step.

    Args:
        states: queries, keys and values, each `[num_tokens, heads, head_dim]`.
        bias: `[num_tokens, heads]`, added to every score of that key; None: nothing is added.

    Returns:
        `[num_tokens, heads, head_dim]`.
    """
    query, key, value = states
    if bias is not None:
        holder.has_biases = True
        query, key = _with_bias(query, key, bias, scale)
    assert holder.step is not None
    extras = {"mask_code": mask_code_of(window)}
    return holder.step.attend(module, query, key, value, scale, extras)


def _with_bias(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return queries and keys with more dimensions whose products times `scale` are the bias."""
    high = bias.to(key.dtype)
    low = (bias - high.to(bias.dtype)).to(key.dtype)
    biases = torch.stack([high, low], dim=-1)
    factors = query.new_full((*query.shape[:2], 2), 1 / scale)
    rest = (0, _BIAS_DIMENSIONS - 2)
    return (
        torch.cat([query, nn.functional.pad(factors, rest)], dim=-1),
        torch.cat([key, nn.functional.pad(biases, rest)], dim=-1),
    )


def _alibi(holder: StepHolder, num_heads: int) -> Tensor:
    """Return slope · position, float32 `[num_tokens, num_heads]`."""
    assert holder.positions is not None
    positions = holder.positions.view(-1, 1)
    return positions * alibi_slopes(num_heads).to(positions.device)


# ── the families ──


def _bloom(
    module: Any, holder: StepHolder, hidden: Tensor, residual: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    parts = module.query_key_value(hidden).view(-1, module.num_heads, 3, module.head_dim)
    bias = _alibi(holder, module.num_heads).to(hidden.dtype).float()
    attended = _attend(module, holder, parts.unbind(2), module.inv_norm_factor, bias)
    return module.dense(attended.reshape(hidden.shape)) + residual, None


def _mpt(module: Any, holder: StepHolder, hidden: Tensor, *_: Any, **__: Any) -> tuple[Any, None]:
    projected = module.Wqkv(hidden)
    if module.clip_qkv:
        projected = projected.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    parts = projected.view(-1, 3, module.n_heads, module.head_dim).unbind(1)
    bias = _alibi(holder, module.n_heads)
    attended = _attend(module, holder, parts, module.softmax_scale, bias)
    return module.out_proj(attended.reshape(hidden.shape)), None


def _falcon(
    module: Any, holder: StepHolder, hidden: Tensor, alibi: Tensor | None, *_: Any, **kwargs: Any
) -> tuple[Any, None]:
    query, key, value = _falcon_heads(module, module.query_key_value(hidden)[0])
    bias = None
    if alibi is None:
        cos, sin = (table[0][:, None] for table in kwargs["position_embeddings"])
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
    else:  # the family rounds slopes and biases to bfloat16, and scales the bias like a score
        slopes = alibi_slopes(module.num_heads).bfloat16().to(hidden.device)
        assert holder.positions is not None
        bias = (slopes * holder.positions.view(-1, 1)).float() * module.inv_norm_factor
        key, value = (part.expand(-1, module.num_heads, -1) for part in (key, value))
    attended = _attend(module, holder, (query, key, value), module.inv_norm_factor, bias)
    return module.dense(attended.reshape(hidden.shape)), None


def _falcon_heads(module: Any, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split `[num_tokens, out]` into queries, keys and values `[num_tokens, heads, head_dim]`."""
    groups = module.num_kv_heads
    if not module.new_decoder_architecture and module.multi_query:
        groups = 1
    parts = joint.view(len(joint), groups, module.num_heads // groups + 2, module.head_dim)
    return parts[:, :, :-2].flatten(1, 2), parts[:, :, -2], parts[:, :, -1]


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = states.shape[-1] // 2
    turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
    return states * cos + turned * sin


def _gpt_j(
    module: Any, holder: StepHolder, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, None]:
    return _by_head(module, holder, (query, key, value), 1 / float(module.scale_attn)), None


def _gpt_neo(
    module: Any, holder: StepHolder, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, None]:
    window = Window(module.config.window_size) if module.attention_type == "local" else None
    return _by_head(module, holder, (query, key, value), 1.0, window), None


def _by_head(
    module: nn.Module,
    holder: StepHolder,
    states: tuple[Tensor, ...],
    scale: float,
    window: Window | None = None,
) -> Tensor:
    """Attend with states `[1, heads, num_tokens, head_dim]`, and return the same form."""
    query, key, value = (part[0].transpose(0, 1).to(states[2].dtype) for part in states)
    attended = _attend(module, holder, (query, key, value), scale, window=window)
    return attended.transpose(0, 1)[None]


# class of the attention module: the function of it that is replaced, and by what
_FAMILIES: dict[str, tuple[str, Replacement]] = {
    "BloomAttention": ("forward", _bloom),
    "MptAttention": ("forward", _mpt),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _gpt_j),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
}
