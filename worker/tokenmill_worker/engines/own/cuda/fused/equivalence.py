"""Tests whether a replacement computes the same as the original module, both in float32 on the same
rows.

Rows are small, usual and large: an epsilon shows on small ones, a clamp on large ones. Attention
and layers run as in the engine, over a cache of three blocks, whose contents must be equal at the
end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.cuda.attention.triton import TritonAttention
from tokenmill_worker.engines.own.cuda.fused.launches import Heads
from tokenmill_worker.engines.own.cuda.fused.modules import DeviceAttention, DeviceLayer
from tokenmill_worker.engines.own.model.equivalence import (
    call_attention,
    close,
    random_rows,
    random_tables,
    two_prompts,
)
from tokenmill_worker.engines.own.model.paged_attention import LayerBinding, PagedStep, Probe

_BLOCK_SIZE = 4


@torch.inference_mode()
def rows_are_equivalent(original: nn.Module, candidate: Any) -> bool:
    """Compare modules that map hidden states to hidden states."""
    weight = next(original.parameters())
    rows = random_rows(weight.shape[-1], weight.device)
    expected: Tensor = original(rows)
    return close(expected, candidate(rows.clone()))


@torch.inference_mode()
def attention_is_equivalent(original: nn.Module, candidate: Any) -> bool:
    return _is_equivalent(original, candidate, candidate)


@torch.inference_mode()
def layers_are_equivalent(original: nn.Module, candidate: Any) -> bool:
    return isinstance(candidate, DeviceLayer) and _is_equivalent(
        original, candidate, candidate.self_attn
    )


@torch.inference_mode()
def extras_of(module: Any, heads: Heads, width: int) -> dict[str, Any] | None:
    """Return the further arguments that a module passes to the attention function, e.g. window and
    softcap.

    Returns None where it passes attention sinks, which the replacement does not support.
    """
    call = call_attention(module, width, heads.rotary_dim)
    return None if call is None or call.extras.get("s_aux") is not None else call.extras


def _is_equivalent(original: nn.Module, candidate: nn.Module, attention: DeviceAttention) -> bool:
    heads, device = attention.heads, attention.qkv.weight.device
    rows = random_rows(attention.qkv.in_features, device)
    arguments = {
        "position_embeddings": random_tables(heads.rotary_dim, device),
        "attention_mask": None,
        "past_key_values": None,
    }
    probe = Probe()
    original(rows, **arguments, paged=probe)
    shape = probe.layers[attention.layer_idx].shape
    backend = TritonAttention()
    found = []
    for module in (original, candidate):
        cache = torch.zeros(
            3,
            2,
            *backend.block_shape(_BLOCK_SIZE, heads.num_kv_heads, heads.head_dim),
            device=device,
        )
        bindings: Any = {attention.layer_idx: LayerBinding(0, cache, shape)}
        out: Any = module(
            rows.clone(),
            **arguments,
            paged=PagedStep(backend, bindings, (two_prompts(_BLOCK_SIZE, device),)),
        )
        out = out[0] if isinstance(out, tuple) else out
        found.append((out, cache[1:].flatten(1)))
    return all(close(a, b) for a, b in zip(*found, strict=True))
