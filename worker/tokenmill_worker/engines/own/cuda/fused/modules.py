"""Replacements for a decoder's norms, MLP, attention and layers, over the Triton kernels of this
package.

Each is built from the module that it replaces and takes the same call. They depend on no model
family: `replace.py` finds the modules that fit and checks each replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.cuda.fused.launches import (
    CacheTarget,
    HeadNorms,
    Heads,
    add_and_norm,
    gate,
    rotate_and_write,
)
from tokenmill_worker.engines.own.cuda.fused.products import DeviceLinear
from tokenmill_worker.engines.own.device import (
    AdaptedProduct,
    AddRows,
    adapt_linear,
    ranges_of_attention,
    ranges_of_mlp,
)
from tokenmill_worker.engines.own.model.equivalence import rotate
from tokenmill_worker.engines.own.model.paged_attention import PagedStep, StepHolder, step_of

Tables = tuple[Tensor, Tensor]


class DeviceNorm(nn.Module):
    """RMS norm over the last dimension; `offset` is 1 where the checkpoint stores weight − 1."""

    def __init__(self, weight: Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x.reshape(-1, x.shape[-1]), None)[0].view(x.shape)

    def after(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of `x + residual`, and that sum."""
        return add_and_norm(x, residual, self.weight, self.eps, self.offset)


class DeviceMLP(nn.Module):
    """Computes `down(act(gate(x)) · up(x))`, with one product for gate and up."""

    replaced = ""

    def __init__(self, gate_up: Tensor, down: nn.Linear, is_gelu: bool) -> None:
        super().__init__()
        self.gate_up = DeviceLinear(gate_up)
        self.down_proj = DeviceLinear(down.weight, down.bias)
        self.is_gelu = is_gelu

    def forward(self, x: Tensor) -> Tensor:
        packed = self.gate_up(x)
        gated = gate(packed.view(-1, packed.shape[-1]), self.is_gelu)
        out: Tensor = self.down_proj(gated)
        return out.view(x.shape)

    def products(self) -> list[AdaptedProduct]:
        layers = ranges_of_mlp(self.down_proj.in_features)
        return [
            AdaptedProduct("gate_up", self.gate_up.in_features, self.gate_up.out_features, layers)
        ]

    def adapt(self, add_to: Callable[[str], AddRows]) -> Callable[[], None]:
        return adapt_linear(self.gate_up, add_to("gate_up"))


class DeviceAttention(nn.Module):
    """Attention with one product for queries, keys and values, and one pass for norms, rotation and
    cache write.

    `extras` are the further arguments (window, softcap) that the original passes to the attention
    function.
    """

    replaced = ""

    def __init__(
        self,
        source: Any,
        qkv: tuple[Tensor, Tensor | None],
        heads: Heads,
        norms: HeadNorms | None,
        extras: dict[str, Any],
    ) -> None:
        super().__init__()
        self.layer_idx: int = source.layer_idx
        self.scaling = float(source.scaling)
        self.qkv = DeviceLinear(*qkv)
        self.o_proj = DeviceLinear(source.o_proj.weight, source.o_proj.bias)
        self.heads, self.norms, self.extras = heads, norms, extras
        self.step_holder: StepHolder | None = getattr(source, "step_holder", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tables,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        attended = self.attend(rows, flat(position_embeddings), step_of(self, kwargs))
        return attended.view(hidden_states.shape), None

    def attend(self, rows: Tensor, tables: Tables, step: Any) -> Tensor:
        packed = self.qkv(rows)
        attended = (
            self._attend_in_place(packed, tables, step) if isinstance(step, PagedStep) else None
        )
        if attended is None:
            attended = self._attend_by_parts(packed, tables, step)
        out: Tensor = self.o_proj(attended.view(rows.shape[0], -1))
        return out

    def products(self) -> list[AdaptedProduct]:
        heads = self.heads
        query, key = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        layers = ranges_of_attention(query, key)
        return [AdaptedProduct("qkv", self.qkv.in_features, self.qkv.out_features, layers)]

    def adapt(self, add_to: Callable[[str], AddRows]) -> Callable[[], None]:
        return adapt_linear(self.qkv, add_to("qkv"))

    def _attend_in_place(self, packed: Tensor, tables: Tables, step: PagedStep) -> Tensor | None:
        """Attend with the fused cache write, or return None where the backend's block layout does
        not allow it.
        """
        binding = step.layers[self.layer_idx]
        strides = step.backend.token_and_head_strides(binding.cache)
        if strides is None:
            return None
        metadata, scales = step.metadata[binding.group], binding.scales
        target = CacheTarget(
            binding.cache, metadata.slot_mapping, metadata.block_size, *strides, scales
        )
        query = rotate_and_write(packed, self.heads, tables, self.norms, target)
        attended = step.backend.attend(query, binding.cache, metadata, binding.shape)
        return attended if scales is None else scales.of_output(attended)

    def _attend_by_parts(self, packed: Tensor, tables: Tables, step: Any) -> Tensor:
        heads = self.heads
        shaped = packed.view(packed.shape[0], -1, heads.head_dim)
        query, key, value = torch.split(
            shaped, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1
        )
        if self.norms is not None:
            query, key = (
                add_and_norm(
                    x.reshape(-1, heads.head_dim), None, weight, self.norms.eps, self.norms.offset
                )[0].view(x.shape)
                for x, weight in ((query, self.norms.query_weight), (key, self.norms.key_weight))
            )
        query, key = rotate(query, *tables), rotate(key, *tables)
        attended: Tensor = step.attend(self, query, key, value, self.scaling, dict(self.extras))
        return attended.contiguous()


class DeviceLayer(nn.Module):
    """A decoder layer with norms before attention and MLP, each fused with the addition before
    it.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.self_attn: DeviceAttention = source.self_attn
        self.mlp: DeviceMLP = source.mlp
        self.input_layernorm: DeviceNorm = source.input_layernorm
        self.post_attention_layernorm: DeviceNorm = source.post_attention_layernorm
        self.attention_type = getattr(source, "attention_type", None)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: Tables, paged: Any, **_: Any
    ) -> Tensor:
        return run_layers((self,), hidden_states, position_embeddings, paged)

    def pass_on(
        self, x: Tensor, residual: Tensor | None, tables: Tables, step: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on `x + residual`; return the MLP's output and the residual still to be
        added to it.
        """
        normed, residual = self.input_layernorm.after(x, residual)
        normed, residual = self.post_attention_layernorm.after(
            self.self_attn.attend(normed, tables, step), residual
        )
        return self.mlp(normed), residual


class DeviceStack(nn.Module):
    """All layers as one module; the addition at a layer's end is fused with the next layer's first
    norm.
    """

    def __init__(self, layers: Sequence[DeviceLayer]) -> None:
        super().__init__()
        self._layers = tuple(layers)
        self.attention_type = layers[0].attention_type

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: Tables, paged: Any, **_: Any
    ) -> Tensor:
        return run_layers(self._layers, hidden_states, position_embeddings, paged)


def run_layers(
    layers: Sequence[DeviceLayer], hidden_states: Tensor, position_embeddings: Tables, step: Any
) -> Tensor:
    tables = flat(position_embeddings)
    x, residual = layers[0].pass_on(
        hidden_states.reshape(-1, hidden_states.shape[-1]), None, tables, step
    )
    for layer in layers[1:]:
        x, residual = layer.pass_on(x, residual, tables, step)
    return (x + residual).view(hidden_states.shape)


def flat(tables: Tables) -> Tables:
    """Reshape `[1, num_tokens, rotary_dim]` to rows."""
    cos, sin = tables
    return cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])
