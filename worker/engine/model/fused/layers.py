"""Finds the decoder layers that run as one call, and keeps a stand-in only if it agrees with the layer.

Both are run on the same rows with a small cache of their own: the rows that come out and what was written
to the cache must be equal.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor, nn

from worker.engine.attention import AttentionMetadata, AttentionShape
from worker.engine.attention.cpu import CpuAttention
from worker.engine.model.fused.agreement import call_attention, close, random_rows, random_tables
from worker.engine.model.fused.layer import FusedLayer
from worker.engine.model.fused.layer_calls import LayerParts, Scratch
from worker.engine.model.fused.modules import FusedAttention, FusedMLP, FusedNorm
from worker.engine.model.paged import LayerBinding, PagedStep

log = logging.getLogger(__name__)

_BEFORE = ("input_layernorm", "post_attention_layernorm")
_AROUND = ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
_BLOCK_SIZE = 16
_SEQ_LENS = (2, 3)  # the rows of `random_rows` as two prompts


def fuse_layers(model: nn.Module) -> Counter[str]:
    """Swap in place what fits; the count of stand-ins."""
    scratch = Scratch()
    count = 0
    for stack in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for index, layer in enumerate(stack):
            parts = _parts(layer)
            if parts is not None and _agrees(layer, candidate := FusedLayer(layer, parts, scratch), parts):
                stack[index] = candidate
                count += 1
    return Counter({FusedLayer.__name__: count} if count else {})


def _parts(layer: nn.Module) -> LayerParts | None:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not isinstance(attention, FusedAttention) or not isinstance(mlp, FusedMLP):
        return None
    if any(norm is not None and not isinstance(norm, FusedNorm) for norm in (attention.q_norm, attention.k_norm)):
        return None
    names = ["input_layernorm", "post_attention_layernorm"]
    if hasattr(layer, "pre_feedforward_layernorm"):  # norms on both sides of attention and MLP
        names = [
            "input_layernorm",
            "pre_feedforward_layernorm",
            "post_attention_layernorm",
            "post_feedforward_layernorm",
        ]
    norms = [norm for name in names if isinstance(norm := getattr(layer, name, None), FusedNorm)]
    if len(norms) != len(names):
        return None
    return LayerParts(attention, mlp, (norms[0], norms[1]), tuple(norms[2:]))


def _agrees(layer: nn.Module, candidate: nn.Module, parts: LayerParts) -> bool:
    attention = parts.attention
    shape = _shape(attention, attention.qkv.k)
    if shape is None or CpuAttention.why_not(torch.device("cpu"), torch.float32, shape, _BLOCK_SIZE) is not None:
        return False
    tables = random_tables(attention.rotary_dim)
    expected, found = (_run(module, attention, shape, tables) for module in (layer, candidate))
    if expected is None or found is None:
        return False
    return all(close(a, b) for a, b in zip(expected, found, strict=True))


def _shape(attention: FusedAttention, width: int) -> AttentionShape | None:
    call = call_attention(attention, width, attention.rotary_dim)
    if call is None:
        return None
    return AttentionShape(
        attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scaling, call.extras.get("softcap")
    )


@torch.inference_mode()
def _run(
    module: nn.Module, attention: FusedAttention, shape: AttentionShape, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """The rows that come out and the cache; None where the module does not take or give what layers usually do."""
    backend = CpuAttention()
    cache = torch.zeros(3, 2, *backend.block_shape(_BLOCK_SIZE, shape.num_kv_heads, shape.head_dim))
    binding = LayerBinding(0, cache, shape)
    step = PagedStep(backend, {attention.layer_idx: binding}, (_metadata(),))  # type: ignore[arg-type]
    rows = random_rows(attention.qkv.k)
    kept = rows.clone()
    try:
        out = module(rows, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
                     position_embeddings=tables, paged=step)  # fmt: skip
    except Exception as error:
        log.debug("not fused: %s", error)
        return None
    return (out, cache) if isinstance(out, Tensor) and torch.equal(rows, kept) else None


def _metadata() -> AttentionMetadata:
    return AttentionMetadata(
        query_start=torch.tensor([0, 2, 5], dtype=torch.int32),
        seq_lens=torch.tensor(_SEQ_LENS, dtype=torch.int32),
        block_table=torch.tensor([[1], [2]], dtype=torch.int32),
        slot_mapping=torch.tensor([16, 17, 32, 33, 34]),
        max_query_len=max(_SEQ_LENS),
        max_seq_len=max(_SEQ_LENS),
        block_size=_BLOCK_SIZE,
        window=None,
        query_lens_host=_SEQ_LENS,
        seq_lens_host=_SEQ_LENS,
    )
