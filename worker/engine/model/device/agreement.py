"""Does a stand-in give the numbers of the module that it would replace? Both in float32, on the same rows.

Rows are small, usual and large: an epsilon shows on small ones, a clamp on large ones. Attention and layers run as
in the engine, over a cache of three blocks, which must hold the same in the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worker.engine.attention import AttentionMetadata
from worker.engine.attention.triton import TritonAttention
from worker.engine.model.device.launches import Heads
from worker.engine.model.device.modules import DeviceAttention, DeviceLayer
from worker.engine.model.fused.agreement import close
from worker.engine.model.paged import LayerBinding, PagedStep, Probe

_SIZES = (0.003, 0.1, 1.0, 1.0, 40.0)
_LENS = (2, 3)  # these rows as two prompts
_BLOCK_SIZE = 4


@torch.inference_mode()
def of_rows(original: nn.Module, candidate: Any) -> bool:
    """Hidden states in, the same out."""
    weight = next(original.parameters())
    rows = _rows(weight.shape[-1], weight.device)
    expected: Tensor = original(rows)
    return close(expected, candidate(rows.clone()))


@torch.inference_mode()
def of_attention(original: nn.Module, candidate: Any) -> bool:
    return _agree(original, candidate, candidate)


@torch.inference_mode()
def of_layers(original: nn.Module, candidate: Any) -> bool:
    return isinstance(candidate, DeviceLayer) and _agree(original, candidate, candidate.self_attn)


@torch.inference_mode()
def extras_of(module: Any, heads: Heads, width: int) -> dict[str, Any] | None:
    """What it hands to the attention function beside queries, keys and values; None where that cannot be kept."""
    probe = _Listener()
    weight = next(module.parameters())
    rows = _rows(width, weight.device).to(weight.dtype)
    tables = tuple(table.to(weight.dtype) for table in _tables(heads.rotary_dim, weight.device))
    module(rows, position_embeddings=tables, attention_mask=None, past_key_values=None, paged=probe)
    return None if probe.extras.get("s_aux") is not None else probe.extras


class _Listener(Probe):
    """Keeps the further arguments of the last call."""

    extras: dict[str, Any]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, extras: dict[str, Any]
    ) -> Tensor:
        self.extras = {name: extra for name, extra in extras.items() if extra is not None}
        return super().attend(module, query, key, value, scale, extras)


def _agree(original: nn.Module, candidate: nn.Module, attention: DeviceAttention) -> bool:
    heads, device = attention.heads, attention.weight.device
    rows = _rows(attention.weight.shape[1], device)
    arguments = {
        "position_embeddings": _tables(heads.rotary_dim, device),
        "attention_mask": None,
        "past_key_values": None,
    }
    probe = Probe()
    original(rows, **arguments, paged=probe)
    shape = probe.layers[attention.layer_idx].shape
    backend = TritonAttention()
    found = []
    for module in (original, candidate):
        cache = torch.zeros(3, 2, *backend.block_shape(_BLOCK_SIZE, heads.num_kv_heads, heads.head_dim), device=device)
        bindings: Any = {attention.layer_idx: LayerBinding(0, cache, shape)}
        out: Any = module(rows.clone(), **arguments, paged=PagedStep(backend, bindings, (_metadata(device),)))
        out = out[0] if isinstance(out, tuple) else out
        found.append((out, cache[1:].flatten(1)))
    return all(close(a, b) for a, b in zip(*found, strict=True))


def _rows(width: int, device: torch.device) -> Tensor:
    rows = torch.randn(len(_SIZES), width, generator=torch.Generator().manual_seed(1))
    return (rows * torch.tensor(_SIZES)[:, None])[None].to(device)


def _tables(rotary_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.randn(len(_SIZES), rotary_dim // 2, generator=torch.Generator().manual_seed(2))
    angles = angles.repeat(1, 2)[None].to(device)
    return angles.cos(), angles.sin()


def _metadata(device: torch.device) -> AttentionMetadata:
    def ints(values: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return AttentionMetadata(
        query_start=ints([0, 2, 5]),
        seq_lens=ints([*_LENS]),
        block_table=ints([[1], [2]]),
        slot_mapping=ints([4, 5, 8, 9, 10], torch.int64),
        max_query_len=max(_LENS),
        max_seq_len=max(_LENS),
        block_size=_BLOCK_SIZE,
        window=None,
        query_lens_host=_LENS,
        seq_lens_host=_LENS,
    )
