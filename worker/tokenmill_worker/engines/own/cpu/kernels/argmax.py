"""Argmax of each row of a linear layer, computed without storing the layer's outputs (argmax.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from tokenmill_worker.engines.own.cpu.kernels.draw import RotatingBuffers
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.linear import Epilogue, LinearArguments
from tokenmill_worker.engines.own.cpu.kernels.program import KernelCall

_ALIGNMENT = 64


class _ArgmaxArguments(ctypes.Structure):
    """Arguments of the argmax kernel; the fields match the struct in draw.cpp."""

    _fields_: ClassVar = [(name, c_void_p) for name in ("seen", "token_ids", "peaks")] + [
        ("num_rows", c_int64)
    ]


class ArgmaxOutputs:
    """The argmax kernel of a program; raises KernelUnavailableError where it cannot be compiled.

    `step` follows the layer in a program. It does nothing unless `ask` was called before the run.
    """

    def __init__(self) -> None:
        library = load("draw")
        library.tokenmill_argmax_bytes.restype = library.tokenmill_argmax_rows.restype = c_int64
        self._bytes: int = library.tokenmill_argmax_bytes()  # per thread
        self.most_rows: int = library.tokenmill_argmax_rows()
        self._seen = torch.zeros(0, dtype=torch.uint8)
        self._arguments = _ArgmaxArguments()
        self._buffers = RotatingBuffers(0)
        self.step = KernelCall(library.tokenmill_argmax_member, self._arguments)

    def ask(self, layer: LinearArguments, num_rows: int, num_threads: int) -> tuple[Tensor, Tensor]:
        """Make the next run compute the argmax of each row; return the tensors that it will fill.

        They are column ids `[rows]` int64 and the highest outputs `[rows]`, which are NaN where a
        row holds a NaN. There may be up to `most_rows` rows. Both stay valid during the next two
        calls.
        """
        if self._seen.numel() < num_threads * self._bytes + _ALIGNMENT:
            self._seen = torch.zeros(num_threads * self._bytes + _ALIGNMENT, dtype=torch.uint8)
        start = self._seen.data_ptr()
        start += -start % _ALIGNMENT
        if self._buffers.num_rows != num_rows:
            self._buffers = RotatingBuffers(num_rows)
        layer.epilogue, layer.y = int(Epilogue.ARGMAX), start
        arguments = self._arguments
        arguments.seen, arguments.num_rows = start, num_rows
        token_ids, peaks, arguments.token_ids, arguments.peaks = self._buffers.next()
        return token_ids, peaks

    def dismiss(self, layer: LinearArguments) -> None:
        """Make the layer store its outputs again."""
        layer.epilogue, self._arguments.num_rows = int(Epilogue.PLAIN), 0
