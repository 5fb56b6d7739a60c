"""Packed and fused replacements for a decoder's linear layers, norms, MLP and attention, on the CPU
in float32.

Each is built from the module that it replaces and takes the same call. Hidden states are packed,
`[1, num_tokens, hidden]`. They depend on no model family: `replace.py` finds the modules that fit
and checks each replacement.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.cpu.fused.adapted import PackedProducts
from tokenmill_worker.engines.own.cpu.kernels.linear import (
    Epilogue,
    LinearKernels,
    PackedWeight,
    Packer,
    pack_gated,
)
from tokenmill_worker.engines.own.device import (
    LayerRanges,
    ranges_of_attention,
    ranges_of_mlp,
)
from tokenmill_worker.engines.own.model.equivalence import rotate
from tokenmill_worker.engines.own.model.paged_attention import StepHolder, step_of


class PackedLinear(PackedProducts, nn.Module):
    """`nn.Linear` over a packed weight `[out_features, in_features]`."""

    def __init__(self, packer: Packer, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = packer.pack(weight, bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def layer_ranges(self) -> dict[str, LayerRanges]:
        return {"packed": {"": (0, self.out_features)}}


class FusedNorm(nn.Module):
    """RMS norm over the last dimension; `offset` is 1 where the checkpoint stores weight − 1
    (Gemma).
    """

    def __init__(self, kernels: LinearKernels, weight: Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = nn.Parameter(weight.detach().float().contiguous(), requires_grad=False)
        self.eps, self.offset = eps, offset
        self.member = kernels.norm_member

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._kernels.rms_norm(rows, self.weight, self.eps, self.offset).view(x.shape)


class FusedMLP(PackedProducts, nn.Module):
    """Computes `down(act(gate(x)) · up(x))` by two kernel calls, the activation inside the
    first.
    """

    def __init__(
        self, packer: Packer, gate: Tensor, up: Tensor, down: nn.Linear, epilogue: Epilogue
    ) -> None:
        super().__init__()
        self.gate_up = pack_gated(packer, gate, up)
        self.half_panel = packer.panel_width // 2
        self.down = packer.pack(down.weight, down.bias)
        self.epilogue = epilogue

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.down(self.gate_up(rows, self.epilogue)).view(x.shape)

    def layer_ranges(self) -> dict[str, LayerRanges]:
        return {"gate_up": ranges_of_mlp(self.down.k), "down": {"down_proj": (0, self.down.n)}}


class FusedAttention(PackedProducts, nn.Module):
    """Attention with one product for queries, keys and values, and one pass for rotation and cache
    write.

    `source` is the model's own attention module. `extras` are the further arguments (window,
    softcap, sinks) that it passes to the attention function. Query and key norms, where the family
    has them, come before the rotation.
    """

    def __init__(
        self,
        source: Any,
        qkv: PackedWeight,
        out: PackedWeight,
        heads: tuple[int, int],
        rotary_dim: int,
        extras: dict[str, Any],
    ) -> None:
        super().__init__()
        self.layer_idx: int = source.layer_idx
        self.scaling = float(source.scaling)
        self.head_dim: int = source.head_dim
        self.num_heads, self.num_kv_heads = heads
        self.q_norm: nn.Module | None = getattr(source, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(source, "k_norm", None)
        self.qkv, self.out = qkv, out
        self.rotary_dim = rotary_dim
        sinks = extras.get("s_aux")
        self.sinks: Tensor | None = None if sinks is None else sinks.float().contiguous()
        self._extras = extras
        self.step_holder: StepHolder | None = getattr(source, "step_holder", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        packed = self.qkv(rows).view(rows.shape[0], -1, self.head_dim)
        query, key, value = torch.split(
            packed, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        step: Any = step_of(self, kwargs)
        if position_embeddings is None:
            attended = step.attend(self, query, key, value, self.scaling, self._extras | kwargs)
            return self.out(attended.reshape(rows.shape[0], -1)).view(hidden_states.shape), None
        cos, sin = (table.reshape(rows.shape[0], -1) for table in position_embeddings)
        if getattr(step, "can_rotate", False):
            attended = step.rotate_and_attend(self, query, key, value, (cos, sin), self.sinks)
        else:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            attended = step.attend(self, query, key, value, self.scaling, self._extras | kwargs)
        return self.out(attended.reshape(rows.shape[0], -1)).view(hidden_states.shape), None

    def layer_ranges(self) -> dict[str, LayerRanges]:
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {"qkv": ranges_of_attention(query, key), "out": {"o_proj": (0, self.out.n)}}
