"""Kernel calls of one decoder layer: their arguments, their order, and which of them change when.

All layers of a model share the buffers of one `Scratch`, so only one thread may run a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention import AttentionMetadata
from tokenmill_worker.engines.own.cpu.attention import (
    KV_TYPES,
    AttendArguments,
    CpuAttention,
    WriteArguments,
)
from tokenmill_worker.engines.own.cpu.fused.modules import FusedAttention, FusedMLP, FusedNorm
from tokenmill_worker.engines.own.cpu.kernels.linear import (
    Epilogue,
    LinearArguments,
    NormArguments,
    PackedWeight,
)
from tokenmill_worker.engines.own.cpu.kernels.program import KernelCall
from tokenmill_worker.engines.own.model.paged_attention import LayerBinding

FLOAT_BYTES = 4


class Scratch:
    """Buffers for values that live only within a layer; `version` changes when they move."""

    def __init__(self) -> None:
        self.version = 0
        self._rows = 0
        self._widths: dict[str, int] = {}
        self._buffers: dict[str, Tensor] = {}
        self._work_bytes = 0  # per row

    def reserve(self, widths: dict[str, int], weights: tuple[PackedWeight, ...]) -> None:
        """Reserve row widths of buffers, and the workspaces of these weights, for a layer."""
        for name, width in widths.items():
            self._widths[name] = max(width, self._widths.get(name, 0))
        self._work_bytes = max(self._work_bytes, *(weight.row_bytes for weight in weights))
        self._rows = 0

    def fit(self, num_rows: int) -> None:
        if num_rows <= self._rows:
            return
        self._rows = max(num_rows, self._rows * 2)
        self._buffers = {
            name: torch.empty(self._rows * width) for name, width in self._widths.items()
        }
        self._buffers["work"] = torch.empty(self._rows * self._work_bytes, dtype=torch.uint8)
        self.version += 1

    def at(self, name: str) -> int:
        return self._buffers[name].data_ptr()


class LayerParts:
    """The replaced parts of one layer.

    `before` are the norms before attention and MLP; `after` those behind them, where the family has
    them.
    """

    def __init__(
        self,
        attention: FusedAttention,
        mlp: FusedMLP,
        before: tuple[FusedNorm, FusedNorm],
        after: tuple[FusedNorm, ...],
    ) -> None:
        self.attention, self.mlp, self.before, self.after = attention, mlp, before, after
        self.weights = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        self.hidden = attention.out.n
        query = attention.num_heads * attention.head_dim
        self.widths = {
            "qkv": attention.qkv.n,
            "attended": query,
            "gated": mlp.down.k,
            "raw": self.hidden,  # input of a norm behind attention or MLP
            "rotated": query,  # queries of the last layer, and rows of it that are read
            "picked_query": query,
            "picked": self.hidden,
        }


class Rotation(NamedTuple):
    """Addresses of the tokens' cosines and sines.

    Each token has `width` of both; tokens are `stride` floats apart.
    """

    cos: int
    sin: int
    stride: int
    width: int


class LayerCalls:
    """Arguments of a layer's kernel calls, in order, with methods for those that change."""

    def __init__(self, parts: LayerParts) -> None:
        attention, mlp, hidden = parts.attention, parts.mlp, parts.hidden
        last = Epilogue.PLAIN if parts.after else Epilogue.ADD
        row = attention.qkv.n
        self._parts = parts
        self.after = [norm_arguments(norm, hidden) for norm in parts.after]
        self.heads = [
            (norm_arguments(norm, row, count), count)
            for norm, count in (
                (attention.q_norm, attention.num_heads),
                (attention.k_norm, attention.num_kv_heads),
            )
            if isinstance(norm, FusedNorm)
        ]
        self.qkv = linear_arguments(attention.qkv, Epilogue.PLAIN, row, parts.before[0])
        self.out = linear_arguments(attention.out, last, hidden)
        self.gate_up = linear_arguments(mlp.gate_up, mlp.epilogue, mlp.down.k, parts.before[1])
        self.down = linear_arguments(mlp.down, last, hidden)
        shared = {
            "num_heads": attention.num_heads,
            "num_kv_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
        }
        self.write = WriteArguments(**shared)
        for name in ("query", "key", "value"):
            setattr(self.write, f"{name}_stride", row)
            setattr(self.write, f"{name}_head_stride", attention.head_dim)
        self.write.rotated_stride = row
        self.attend = AttendArguments(
            **shared, query_stride=row, query_head_stride=attention.head_dim
        )
        self._sinks = attention.sinks
        self.attend.sinks = None if self._sinks is None else self._sinks.data_ptr()

    def steps(self, backend: CpuAttention) -> list[KernelCall]:
        parts = self._parts
        write, attend = backend.members
        self.attend.uses_amx = backend.uses_amx
        norm = parts.before[0].member

        def behind(index: int) -> list[KernelCall]:
            return [KernelCall(norm, self.after[index])] if self.after else []

        return [
            KernelCall(parts.attention.qkv.member, self.qkv),
            *(KernelCall(norm, arguments) for arguments, _ in self.heads),
            KernelCall(write, self.write),
            KernelCall(attend, self.attend),
            KernelCall(parts.attention.out.member, self.out),
            *behind(0),
            KernelCall(parts.mlp.gate_up.member, self.gate_up),
            KernelCall(parts.mlp.down.member, self.down),
            *behind(1),
        ]

    def point(self, scratch: Scratch, parts: LayerParts) -> None:
        """Set the addresses of the buffers after they have moved."""
        qkv, head = scratch.at("qkv"), parts.attention.head_dim * FLOAT_BYTES
        key = qkv + parts.attention.num_heads * head
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            linear.workspace = scratch.at("work")
        self.qkv.y = self.write.query = self.write.rotated = self.attend.query = qkv
        self.write.key, self.write.value = key, key + parts.attention.num_kv_heads * head
        for (arguments, _), start in zip(self.heads, (qkv, key), strict=False):
            arguments.x = arguments.y = start
        self.attend.out = self.out.x = scratch.at("attended")
        self.gate_up.y = self.down.x = scratch.at("gated")
        if self.after:
            self.out.y = self.down.y = self.after[0].x = self.after[1].x = scratch.at("raw")

    def prefetch_next(self, attend: AttendArguments, then: AttendArguments | None) -> None:
        """Set the attention that follows the first product, and the one that follows the layer's
        other products.

        The kernels prefetch its keys and values.
        """
        self.qkv.ahead = addressof(attend)
        for linear in (self.out, self.gate_up, self.down):
            linear.ahead = None if then is None else addressof(then)

    def resize(self, num_tokens: int) -> None:
        for arguments in (*self.after, self.qkv, self.out, self.gate_up, self.down):
            arguments.m = num_tokens
        for arguments, count in self.heads:
            arguments.m = num_tokens * count
        self.write.num_tokens = self.attend.num_tokens = num_tokens

    def bind(self, binding: LayerBinding, metadata: AttentionMetadata) -> None:
        """Set the layer's cache and scales, which do not move during an engine's life."""
        cache, shape = binding.cache, binding.shape
        for arguments in (self.write, self.attend):
            arguments.cache, arguments.kv_type = cache.data_ptr(), KV_TYPES[cache.dtype]
            arguments.block_stride, arguments.value_offset = cache.stride(0), cache.stride(1)
            arguments.block_size = metadata.block_size
            scales = binding.scales
            arguments.key_scales = None if scales is None else scales.key.data_ptr()
            arguments.value_scales = None if scales is None else scales.value.data_ptr()
        self.attend.set_window(metadata.window)
        self.attend.scale, self.attend.softcap = shape.scale, shape.softcap or 0.0

    def read(self, metadata: AttentionMetadata) -> None:
        """Set which keys and values each query reads."""
        for name, value in _reading(metadata):
            setattr(self.attend, name, value)


class LayerTable:
    """Arguments of all layers' calls, those of each kernel adjacent in memory.

    A value that is new in every step is written to all layers at once, one field at a time. So the
    Python of a step does not grow with the number of layers.
    """

    def __init__(self, layers: Sequence[LayerCalls], narrow: LayerCalls | None) -> None:
        """Move the arguments of all layers into arrays.

        `narrow`, another form of the last layer, shares only the arguments that concern every
        token.
        """
        every = [*layers, *([] if narrow is None else [narrow])]
        self._writes = _join(every, "write")
        self._attends = _join(layers, "attend")
        for calls, then in zip(layers, (*layers[1:], None), strict=True):
            calls.prefetch_next(calls.attend, None if then is None else then.attend)
        if narrow is not None:
            narrow.prefetch_next(layers[-1].attend, None)
        self._first, gate_up = _join(layers, "qkv")["x"], _join(layers, "gate_up")
        out, down = _join(layers, "out"), _join(layers, "down")
        self._on_out = [gate_up["x"]]
        if layers[0].after:
            after = [_join([(calls.after, place) for calls in layers]) for place in range(2)]
            self._inputs = after[0]["residual"]
            self._on_out += [after[0]["y"], after[1]["residual"], after[1]["y"]]
        else:
            self._inputs = out["residual"]
            self._on_out += [out["y"], down["residual"], down["y"]]
        self._rotation = [self._writes[name] for name in ("cos", "sin", "cos_stride", "rotary_dim")]
        # group, its indices in the writes and in the attends
        self._groups: list[tuple[int, Any, Any]] = []
        self._used: object = None  # arguments of the last call

    def assign(self, groups: Sequence[int]) -> None:
        """Set the layer group of each layer, whose metadata it reads."""
        each = np.array([*groups, *groups[-1:]])[: len(self._writes)]
        is_one = len(set(groups)) == 1
        self._used = None
        self._groups = [
            (
                group,
                *((slice(None),) * 2 if is_one else (each == group, each[: len(groups)] == group)),
            )
            for group in dict.fromkeys(groups)
        ]

    def use(
        self, x: int, out: int, rotation: Rotation, metadata: Sequence[AttentionMetadata]
    ) -> None:
        """Set the arguments that may change in every call.

        All layers but the first read and write `out`.
        """
        reading = {group: _reading(metadata[group]) for group, _, _ in self._groups}
        slots = {group: metadata[group].slot_mapping.data_ptr() for group in reading}
        used = (x, out, rotation, reading, slots)
        if used == self._used:
            return
        self._used = used
        for field in (self._first, self._inputs):
            field.fill(out)
            field[0] = x
        for field in self._on_out:
            field.fill(out)
        for field, value in zip(self._rotation, rotation, strict=True):
            field.fill(value)
        for group, of_writes, of_attends in self._groups:
            self._writes["slots"][of_writes] = slots[group]
            for name, value in reading[group]:
                self._attends[name][of_attends] = value


def _join(owners: Sequence[Any], name: str = "") -> Any:
    """Move a structure of each owner into one array and return a view of it.

    The structure is the owner's attribute `name`, or an entry of a list.
    """
    places = [(vars(owner), name) if name else owner for owner in owners]
    kind = type(places[0][0][places[0][1]])
    array = (kind * len(places))(*(holder[key] for holder, key in places))
    for (holder, key), structure in zip(places, array, strict=True):
        holder[key] = structure
    return np.frombuffer(array, np.dtype(kind))


def _reading(metadata: AttentionMetadata) -> tuple[tuple[str, int], ...]:
    return (
        ("query_start", metadata.query_start.data_ptr()),
        ("seq_lens", metadata.seq_lens.data_ptr()),
        ("block_table", metadata.block_table.data_ptr()),
        ("table_stride", metadata.block_table.stride(0)),
        ("num_seqs", metadata.num_seqs),
    )


def linear_arguments(
    weight: PackedWeight, epilogue: Epilogue, columns: int, norm: FusedNorm | None = None
) -> LinearArguments:
    """Return the arguments of a linear kernel; `norm` is applied to its input rows."""
    arguments = weight.arguments(epilogue)
    arguments.x_stride, arguments.y_stride = weight.k, columns
    if norm is not None:
        arguments.norm, arguments.norm_eps, arguments.norm_offset = (
            norm.weight.data_ptr(),
            norm.eps,
            norm.offset,
        )
    return arguments


def norm_arguments(norm: FusedNorm, stride: int, inner: int = 1) -> NormArguments:
    return NormArguments(
        norm=norm.weight.data_ptr(), norm_eps=norm.eps, norm_offset=norm.offset,
        k=norm.weight.shape[0], inner=inner,
        x_stride=stride, y_stride=stride, residual_stride=stride,
    )  # fmt: skip
