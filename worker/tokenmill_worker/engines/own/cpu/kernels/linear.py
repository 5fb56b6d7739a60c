"""Packed linear layers and RMS norms on the CPU, for modules that replace a model's own.

`PackedWeight` holds a weight in the kernel's panels. It computes in float32, or by sums that are as
exact (amx_float.h, byte_dot.h). `model/fused` decides which weights are packed and fused.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tokenmill_worker.engines.own.cpu.huge_pages import HugePageArena
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.program import Caller

_FEW = 16_384  # elements; below this, one thread normalises as fast as several


class Epilogue(IntEnum):
    """Operation on a row of outputs before it is stored."""

    PLAIN = 0
    ADD = 1  # plus the residual
    SWIGLU = 2  # silu(gate) · up
    GEGLU_TANH = 3  # gelu_tanh(gate) · up
    ARGMAX = 4  # not stored: each thread keeps its highest output (argmax.h)


_NORM: list[tuple[str, type]] = [
    ("norm", c_void_p),
    ("norm_eps", c_float),
    ("norm_offset", c_float),
]  # as in norm.h


class LinearArguments(ctypes.Structure):
    """Arguments of a linear kernel; the fields match the struct in linear.h.

    `norm` is the weight of an RMS norm that rows pass first, or null. `ahead` points to the
    arguments of the next attention in a program, whose keys and values the kernel may prefetch, or
    is null.
    """

    _fields_: ClassVar = [
        *(
            (name, c_void_p)
            for name in ("x", "weight", "scale", "bias", "residual", "y", "workspace")
        ),
        *((name, c_int64) for name in ("x_stride", "y_stride", "m", "n", "k")),
        ("epilogue", c_int32),
        ("uses_amx", c_int32),
        *_NORM,
        ("ahead", c_void_p),
    ]


class NormArguments(ctypes.Structure):
    """Arguments of the RMS norm kernel; the fields match the struct in linear.cpp."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("x", "residual", "y")),
        *(
            (name, c_int64)
            for name in ("x_stride", "y_stride", "residual_stride", "m", "k", "inner")
        ),
        *_NORM,
    ]


class PackedWeight:
    """A weight `[n, k]` in the panels of one kernel, with its bias; call it on float32 rows `[m,
    k]`.

    Scales and biases are padded to whole panels, since kernels load full vectors. `form` names the
    weight's storage format for people. Each row needs `row_bytes` of workspace.
    """

    __slots__ = (
        "_call",
        "bias",
        "form",
        "k",
        "member",
        "n",
        "panels",
        "row_bytes",
        "scale",
        "uses_amx",
    )

    def __init__(
        self,
        call: Caller,
        library: ctypes.CDLL,
        shape: tuple[int, int],
        panels: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        form: str = "float32",
        uses_amx: bool = True,
    ) -> None:
        self._call, self.member = call, library.tokenmill_linear_member
        self.n, self.k = shape
        self.panels, self.scale, self.bias = panels, scale, bias
        self.form, self.uses_amx = form, uses_amx
        library.tokenmill_row_bytes.restype = c_int64
        self.row_bytes = int(library.tokenmill_row_bytes(c_int64(self.k)))

    def arguments(self, epilogue: Epilogue) -> LinearArguments:
        """Return arguments with the fields filled in that are the same in every call."""
        return LinearArguments(
            weight=self.panels.data_ptr(),
            scale=None if self.scale is None else self.scale.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            n=self.n,
            k=self.k,
            epilogue=int(epilogue),
            uses_amx=self.uses_amx,
        )

    def num_columns(self, epilogue: Epilogue) -> int:
        return self.n // 2 if epilogue in (Epilogue.SWIGLU, Epilogue.GEGLU_TANH) else self.n

    def __call__(
        self, x: Tensor, epilogue: Epilogue = Epilogue.PLAIN, residual: Tensor | None = None
    ) -> Tensor:
        """Return `[m, n]`, or `[m, n / 2]` for a gated epilogue.

        `residual` is `[m, n]` and must be contiguous like the result.
        """
        x = _as_rows(x)
        y = torch.empty((x.shape[0], self.num_columns(epilogue)), dtype=torch.float32)
        if x.shape[0] == 0:
            return y
        workspace = torch.empty(x.shape[0] * self.row_bytes, dtype=torch.uint8)
        arguments = self.arguments(epilogue)
        arguments.x, arguments.y, arguments.workspace = (
            x.data_ptr(),
            y.data_ptr(),
            workspace.data_ptr(),
        )
        arguments.residual = None if residual is None else residual.data_ptr()
        arguments.x_stride, arguments.y_stride, arguments.m = x.stride(0), y.stride(0), x.shape[0]
        self._call(self.member, arguments, torch.get_num_threads())
        return y


class Packer(Protocol):
    """Packs weights into the panels of a kernel."""

    panel_width: int

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """Pack `weight` `[n, k]`; the original is not kept."""
        ...


def pack_gated(packer: Packer, gate: Tensor, up: Tensor) -> PackedWeight:
    """Pack gate and up `[n, k]` interleaved half a panel at a time; n must be a multiple of half a
    panel.
    """
    half = packer.panel_width // 2
    n, k = gate.shape
    mixed = torch.stack([gate.reshape(-1, half, k), up.reshape(-1, half, k)], dim=1)
    return packer.pack(mixed.reshape(2 * n, k))


def padded(values: Tensor, panel_width: int) -> Tensor:
    """Return the values in float32, with zeros up to a whole panel."""
    n = values.shape[0]
    whole = torch.zeros(-(-n // panel_width) * panel_width)
    whole[:n] = values.detach()
    return whole


def padded_bias(bias: Tensor | None, panel_width: int) -> Tensor | None:
    return None if bias is None else padded(bias, panel_width)


class LinearKernels:
    """The loaded float32 library; raises KernelUnavailableError where it cannot be compiled.

    With `uses_amx`, products of more than a few rows use the CPU's matrix registers, where it has
    them (amx_float.h); where not, weights of 4 and 8 bits are multiplied as bytes (byte_dot.h).
    Without `uses_amx`, all sums are chains of float32 and the bits of a row's result are the same
    in every batch.
    """

    def __init__(
        self, cache_dir: Path | None = None, march: str = "native", uses_amx: bool = True
    ) -> None:
        self.uses_amx = uses_amx
        self._library = library = load("linear", cache_dir, march)
        self._pack, self.norm_member = library.tokenmill_pack, library.tokenmill_rms_norm_member
        self._pack.restype = None
        self._call = Caller(cache_dir, march)
        self._packed_floats = library.tokenmill_packed_floats
        self._packed_floats.restype = c_int64
        self.panel_width: int = library.tokenmill_panel_width()
        self.has_amx = uses_amx and bool(library.tokenmill_has_amx())
        self._arena = HugePageArena()

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        rows = weight.detach().float().contiguous()
        n, k = rows.shape
        panels = self._arena.take(self._packed_floats(c_int64(n), c_int64(k)), torch.float32)
        self._pack(
            c_void_p(rows.data_ptr()),
            c_void_p(panels.data_ptr()),
            c_int64(n),
            c_int64(k),
            c_int64(k),
        )
        bias = padded_bias(bias, self.panel_width)
        return PackedWeight(
            self._call, self._library, (n, k), panels, None, bias, uses_amx=self.uses_amx
        )

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Normalise `x` `[m, k]` float32, scale it by `offset + weight`, and add `residual` where
        given.
        """
        y = torch.empty(x.shape, dtype=torch.float32)
        arguments = NormArguments(
            x=x.data_ptr(), norm=weight.data_ptr(), y=y.data_ptr(),
            residual=None if residual is None else residual.data_ptr(),
            x_stride=x.stride(0), y_stride=y.stride(0), m=x.shape[0], k=x.shape[1],
            residual_stride=0 if residual is None else residual.stride(0),
            inner=1, norm_eps=eps, norm_offset=offset,
        )  # fmt: skip
        threads = torch.get_num_threads() if x.numel() >= _FEW else 1
        self._call(self.norm_member, arguments, threads)
        return y


def _as_rows(x: Tensor) -> Tensor:
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
