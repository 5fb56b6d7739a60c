"""Finds the decoder layers that can run as one call, and keeps a replacement only if it is
equivalent.

Original and replacement run on the same rows with a small cache each; output rows and cache
contents must be equal. If all layers were replaced and are called in the same way, they become one
call together.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.attention import AttentionShape
from tokenmill_worker.engines.own.cpu.attention import CpuAttention
from tokenmill_worker.engines.own.cpu.fused.layer import FusedLayer, FusedStack
from tokenmill_worker.engines.own.cpu.fused.layer_calls import LayerParts, Scratch
from tokenmill_worker.engines.own.cpu.fused.modules import FusedAttention, FusedMLP, FusedNorm
from tokenmill_worker.engines.own.model.equivalence import (
    call_attention,
    close,
    random_rows,
    random_tables,
    two_prompts,
)
from tokenmill_worker.engines.own.model.paged_attention import LayerBinding, PagedStep
from tokenmill_worker.engines.own.model.replacement import LayersAsOne, has_one_layer_type

log = logging.getLogger(__name__)

_BEFORE = ("input_layernorm", "post_attention_layernorm")
_AROUND = (
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)
BLOCK_SIZE = 16


def fuse_layers(model: nn.Module) -> Counter[str]:
    """Replace fitting layers in place; return the number of replacements."""
    scratch = Scratch()
    count = 0
    for parent, name, stack in list(_lists(model)):
        for index, layer in enumerate(stack):
            parts = _parts(layer)
            if parts is not None and _is_equivalent(
                [layer], candidate := FusedLayer(layer, parts, scratch), [parts]
            ):
                stack[index] = candidate
                count += 1
        joined = _joined(model, list(stack), scratch)
        if joined is not None:
            setattr(parent, name, joined)
    return Counter({FusedLayer.__name__: count} if count else {})


def _lists(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList):
                yield parent, name, child


def _joined(model: nn.Module, layers: list[nn.Module], scratch: Scratch) -> LayersAsOne | None:
    fused = [layer for layer in layers if isinstance(layer, FusedLayer)]
    if len(fused) < max(len(layers), 2) or not _are_called_alike(model, fused):
        return None
    candidate = FusedStack(fused, scratch)
    is_equivalent = _is_equivalent(fused, candidate, [layer.parts for layer in fused])
    return LayersAsOne(fused, candidate) if is_equivalent else None


def _are_called_alike(model: nn.Module, layers: list[FusedLayer]) -> bool:
    """Return whether all layers get the same arguments.

    Some families choose masks or rotary tables by a layer's type, which the types show.
    """
    own_types = {getattr(layer, "attention_type", None) for layer in layers}
    return (
        has_one_layer_type(model)
        and len(own_types) == 1
        and len({_geometry(layer.parts) for layer in layers}) == 1
    )


def _geometry(parts: LayerParts) -> tuple[int, ...]:
    attention = parts.attention
    return (
        parts.hidden,
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.rotary_dim,
        len(parts.after),
    )


def _parts(layer: nn.Module) -> LayerParts | None:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not isinstance(attention, FusedAttention) or not isinstance(mlp, FusedMLP):
        return None
    if any(
        norm is not None and not isinstance(norm, FusedNorm)
        for norm in (attention.q_norm, attention.k_norm)
    ):
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


def small_step(parts: Sequence[LayerParts]) -> PagedStep | None:
    """Return a step of the two prompts of `two_prompts`, with a small cache for each of these
    layers.

    Returns None where the CPU attention does not support the layers.
    """
    attention = parts[0].attention
    shape = _shape(attention, attention.qkv.k)
    if (
        shape is None
        or CpuAttention.why_not(torch.device("cpu"), torch.float32, shape, BLOCK_SIZE) is not None
    ):
        return None
    backend = CpuAttention()
    block = backend.block_shape(BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    bindings = {
        part.attention.layer_idx: LayerBinding(0, torch.zeros(3, 2, *block), shape)
        for part in parts
    }
    return PagedStep(backend, bindings, (two_prompts(BLOCK_SIZE),))


def _is_equivalent(
    layers: Sequence[nn.Module], candidate: nn.Module, parts: Sequence[LayerParts]
) -> bool:
    attention = parts[0].attention
    tables = random_tables(attention.rotary_dim)
    expected, found = (
        _run(modules, small_step(parts), tables, attention.qkv.k)
        for modules in (layers, [candidate])
    )
    if expected is None or found is None:
        return False
    return all(close(a, b) for a, b in zip(expected, found, strict=True))


def _shape(attention: FusedAttention, width: int) -> AttentionShape | None:
    call = call_attention(attention, width, attention.rotary_dim)
    if call is None:
        return None
    return AttentionShape(
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.scaling,
        call.extras.get("softcap"),
    )


@torch.inference_mode()
def _run(
    modules: Sequence[nn.Module], step: PagedStep | None, tables: tuple[Tensor, Tensor], width: int
) -> tuple[Tensor, ...] | None:
    """Run the modules; return the output rows and the caches.

    Returns None where a module does not take a decoder layer's usual arguments, returns no tensor,
    or changes its input.
    """
    if step is None:
        return None
    out = rows = random_rows(width)
    kept = rows.clone()
    try:
        for module in modules:
            out = module(
                out,
                attention_mask=None,
                position_ids=None,
                past_key_values=None,
                use_cache=False,
                position_embeddings=tables,
                paged=step,
            )
    except Exception as error:
        log.debug("A layer is not fused: %s", error)
        return None
    caches = (binding.cache for binding in step.layers.values())
    return (out, *caches) if isinstance(out, Tensor) and torch.equal(rows, kept) else None
