"""Packed linear layers and RMS norms on the CPU, for modules that replace a model's own.

`PackedWeight` holds a weight in the kernel's panels; float32 throughout. A row's result does not depend
on the batch. It knows no model: `model/fused` decides what is packed and fused.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from worker.engine.kernels.library import load


class Epilogue(IntEnum):
    """What is done to a row of outputs before it is stored."""

    PLAIN = 0
    ADD = 1  # plus the residual
    SWIGLU = 2  # silu(gate) · up
    GEGLU_TANH = 3  # gelu_tanh(gate) · up


class _LinearArguments(ctypes.Structure):
    """As in linear.cpp."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "residual", "y")),
        *((name, c_int64) for name in ("x_stride", "y_stride", "m", "n", "k")),
        *((name, c_int32) for name in ("epilogue", "num_threads")),
    ]


class _NormArguments(ctypes.Structure):
    """As in linear.cpp."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("x", "weight", "residual", "y")),
        *((name, c_int64) for name in ("x_stride", "y_stride", "residual_stride", "m", "k")),
        *((name, c_float) for name in ("eps", "offset")),
        ("num_threads", c_int32),
    ]


class LinearKernels:
    """The loaded library. Raises KernelUnavailableError where it cannot be compiled."""

    def __init__(self, cache_dir: Path | None = None, march: str = "native") -> None:
        library = load("linear", cache_dir, march)
        self._linear, self._norm, self._pack = (
            library.tokenmill_linear,
            library.tokenmill_rms_norm,
            library.tokenmill_pack,
        )
        for function in (self._linear, self._norm, self._pack):
            function.restype = None
        self.panel_width: int = library.tokenmill_panel_width()

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """`weight` `[n, k]`; the original is not kept."""
        rows = weight.detach().float().contiguous()
        n, k = rows.shape
        panels = -(-n // self.panel_width)
        packed = torch.empty(panels * self.panel_width * k, dtype=torch.float32)
        self._pack(c_void_p(rows.data_ptr()), c_void_p(packed.data_ptr()), c_int64(n), c_int64(k), c_int64(k))
        padded = None
        if bias is not None:  # padded to whole panels: the kernel loads full vectors
            padded = torch.zeros(panels * self.panel_width)
            padded[:n] = bias.detach().float()
        return PackedWeight(self, packed, padded, n, k)

    def pack_gated(self, gate: Tensor, up: Tensor) -> PackedWeight:
        """Gate and up `[n, k]` interleaved half a panel at a time; n must be a multiple of half a panel."""
        half = self.panel_width // 2
        n, k = gate.shape
        mixed = torch.stack([gate.reshape(-1, half, k), up.reshape(-1, half, k)], dim=1)
        return self.pack(mixed.reshape(2 * n, k))

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, residual: Tensor | None = None
    ) -> Tensor:
        """`x` `[m, k]` float32 → normalised and scaled by `offset + weight`, plus `residual` where given."""
        y = torch.empty(x.shape, dtype=torch.float32)
        arguments = _NormArguments(
            x=x.data_ptr(), weight=weight.data_ptr(), y=y.data_ptr(),
            residual=None if residual is None else residual.data_ptr(),
            x_stride=x.stride(0), y_stride=y.stride(0), m=x.shape[0], k=x.shape[1],
            residual_stride=0 if residual is None else residual.stride(0),
            eps=eps, offset=offset, num_threads=torch.get_num_threads(),
        )  # fmt: skip
        self._norm(ctypes.byref(arguments))
        return y

    def linear(self, x: Tensor, weight: PackedWeight, epilogue: Epilogue, residual: Tensor | None) -> Tensor:
        columns = weight.n // 2 if epilogue >= Epilogue.SWIGLU else weight.n
        y = torch.empty((x.shape[0], columns), dtype=torch.float32)
        if x.shape[0] == 0:
            return y
        arguments = _LinearArguments(
            x=x.data_ptr(), weight=weight.panels.data_ptr(), y=y.data_ptr(),
            bias=None if weight.bias is None else weight.bias.data_ptr(),
            residual=None if residual is None else residual.data_ptr(),
            x_stride=x.stride(0), y_stride=y.stride(0), m=x.shape[0], n=weight.n, k=weight.k,
            epilogue=int(epilogue), num_threads=torch.get_num_threads(),
        )  # fmt: skip
        self._linear(ctypes.byref(arguments))
        return y


class PackedWeight:
    """A weight `[n, k]` in panels, with its bias; call it on float32 rows `[m, k]`."""

    __slots__ = ("_kernels", "bias", "k", "n", "panels")

    def __init__(self, kernels: LinearKernels, panels: Tensor, bias: Tensor | None, n: int, k: int) -> None:
        self._kernels = kernels
        self.panels = panels
        self.bias = bias
        self.n = n
        self.k = k

    def __call__(self, x: Tensor, epilogue: Epilogue = Epilogue.PLAIN, residual: Tensor | None = None) -> Tensor:
        """`[m, n]`, or `[m, n / 2]` for a gated epilogue. `residual` `[m, n]` must be contiguous like the result."""
        return self._kernels.linear(_as_rows(x), self, epilogue, residual)


def _as_rows(x: Tensor) -> Tensor:
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
