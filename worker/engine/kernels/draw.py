"""Drawing a batch's tokens on the CPU in one pass over the logits, through a C++ kernel.

The same choice as `sampling/noise.py` and `sampling/truncation.py` make with torch, a dozen times faster; a row's
token depends neither on the batch nor on the number of threads. It knows parameters as arrays, no sequences.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.engine.kernels.library import load
from worker.engine.kernels.program import Caller
from worker.engine.kernels.toolchain import KernelUnavailableError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drawing:
    """How each row is drawn, all `[rows]` and contiguous."""

    inverse_temperature: npt.NDArray[np.float32]  # 0: the highest logit
    log_min_p: npt.NDArray[np.float32]  # −inf: off
    top_p: npt.NDArray[np.float64]  # 1: off
    top_k: npt.NDArray[np.int64]  # the vocabulary's size or more: off

    @cached_property
    def arguments(self) -> _Arguments:
        """What stays the same while this is drawn from; the rest is the caller's to fill in."""
        return _Arguments(
            inverse_temperature=self.inverse_temperature.ctypes.data, log_min_p=self.log_min_p.ctypes.data,
            top_p=self.top_p.ctypes.data, top_k=self.top_k.ctypes.data,
        )  # fmt: skip


def draw_kernel(device: torch.device) -> DrawKernel | None:
    """None where torch has to draw: not on the CPU, or no compiler."""
    if device.type != "cpu":
        return None
    try:
        return DrawKernel()
    except KernelUnavailableError as error:
        log.warning("tokens are drawn by torch, several times slower: %s", error)
        return None


class _Arguments(ctypes.Structure):
    """As in draw.cpp."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("logits", "inverse_temperature", "log_min_p", "top_p", "top_k", "keys")),
        *((name, c_void_p) for name in ("token_ids", "peaks")),
        *((name, c_int64) for name in ("num_rows", "vocab", "stride")),
    ]


class DrawKernel:
    """Raises KernelUnavailableError where it cannot be compiled."""

    def __init__(self, cache_dir: Path | None = None, march: str = "native") -> None:
        self._call, self._member = Caller(cache_dir, march), load("draw", cache_dir, march).tokenmill_draw_member

    def draw(self, logits: Tensor, drawing: Drawing, keys: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Token ids `[rows]` int64 and each row's highest logit, which is finite in a good row.

        `logits` `[rows, vocab]` float32 on the CPU, its rows contiguous; `keys` `[rows, 2]`.
        """
        num_rows, vocab = logits.shape
        token_ids, peaks = torch.zeros(num_rows, dtype=torch.int64), torch.empty(num_rows)
        if num_rows == 0:
            return token_ids, peaks
        keys = np.ascontiguousarray(keys)
        arguments = drawing.arguments
        arguments.logits, arguments.stride = logits.data_ptr(), logits.stride(0)
        arguments.vocab, arguments.num_rows, arguments.keys = vocab, num_rows, keys.ctypes.data
        arguments.token_ids, arguments.peaks = token_ids.data_ptr(), peaks.data_ptr()
        self._call(self._member, arguments, min(torch.get_num_threads(), num_rows))
        return token_ids, peaks
