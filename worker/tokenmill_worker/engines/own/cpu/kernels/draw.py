"""Samples a batch's tokens on the CPU in one pass over the logits, through a C++ kernel.

It chooses the same tokens as `sampling/noise.py` and `sampling/truncation.py` do with torch, a
dozen times faster. A row's token depends neither on the batch nor on the number of threads.
Parameters come as arrays, one entry per row.
"""

from __future__ import annotations

import ctypes
from collections import deque
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.program import Caller
from tokenmill_worker.engines.own.sampling.draws import SamplingArrays

_TURNS = 3  # two steps may be in flight while a third begins


class _DrawArguments(ctypes.Structure):
    """Arguments of the sampling kernel; the fields match the struct in draw.cpp."""

    _fields_: ClassVar = [
        *(
            (name, c_void_p)
            for name in ("logits", "inverse_temperature", "log_min_p", "top_p", "top_k", "keys")
        ),
        *((name, c_void_p) for name in ("token_ids", "peaks")),
        *((name, c_int64) for name in ("num_rows", "vocab", "stride")),
    ]


class RotatingBuffers:
    """Rotating result buffers for `num_rows` rows; a result stays valid during the next two
    calls.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._kept: deque[tuple[Tensor, Tensor, int, int]] = deque()

    def next(self) -> tuple[Tensor, Tensor, int, int]:
        """Return the buffers to be written next, and their addresses.

        They are token ids `[num_rows]` int64 and highest logits `[num_rows]`.
        """
        if len(self._kept) < _TURNS:
            ids, tops = torch.zeros(self.num_rows, dtype=torch.int64), torch.zeros(self.num_rows)
            self._kept.appendleft((ids, tops, ids.data_ptr(), tops.data_ptr()))
        result = self._kept[0]
        self._kept.rotate(-1)
        return result


class Buffers:
    """Arguments and results of the sampling kernel for one batch, reused by its steps.

    A step's weights evict everything else from the CPU caches, so that every allocation after it is
    slow.
    """

    def __init__(self, arrays: SamplingArrays) -> None:
        num_rows = len(arrays.top_k)
        self._keys = np.zeros((num_rows, 2), np.int32)
        self._buffers = RotatingBuffers(num_rows)
        self.arguments = _DrawArguments(
            inverse_temperature=arrays.inverse_temperature.ctypes.data,
            log_min_p=arrays.log_min_p.ctypes.data,
            top_p=arrays.top_p.ctypes.data, top_k=arrays.top_k.ctypes.data,
            keys=self._keys.ctypes.data,
            num_rows=num_rows,
        )  # fmt: skip

    def turn(self, keys: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Set the keys and return the token ids and peaks to be written next."""
        self._keys[...] = keys
        token_ids, peaks, self.arguments.token_ids, self.arguments.peaks = self._buffers.next()
        return token_ids, peaks


class DrawKernel:
    """The loaded sampling kernel; raises KernelUnavailableError where it cannot be compiled.

    It keeps the last batch's buffers; only one thread may use an instance.
    """

    takes_any_dtype = False

    def __init__(self, cache_dir: Path | None = None, march: str = "native") -> None:
        self._call, self._member = (
            Caller(cache_dir, march),
            load("draw", cache_dir, march).tokenmill_draw_member,
        )
        self._arrays: SamplingArrays | None = None
        self._buffers: Buffers | None = None

    def draw(
        self, logits: Tensor, arrays: SamplingArrays, keys: npt.NDArray[np.int32]
    ) -> tuple[Tensor, Tensor]:
        """Return token ids `[rows]` int64 and each row's highest logit, finite in a good row.

        Both belong to the batch's buffers and stay valid during the next two calls.

        Args:
            logits: `[rows, vocab]` float32 on the CPU, its rows contiguous.
            keys: `[rows, 2]`.
        """
        num_rows, vocab = logits.shape
        buffers = self._buffers
        if buffers is None or arrays is not self._arrays:
            buffers = self._buffers = Buffers(arrays)
            self._arrays = arrays
        token_ids, peaks = buffers.turn(keys)
        if num_rows == 0:
            return token_ids, peaks
        arguments = buffers.arguments
        arguments.logits, arguments.stride, arguments.vocab = (
            logits.data_ptr(),
            logits.stride(0),
            vocab,
        )
        self._call(self._member, arguments, min(torch.get_num_threads(), num_rows))
        return token_ids, peaks
