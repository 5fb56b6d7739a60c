"""The highest output of each row of a linear layer, which stores none of them (highest.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from worker.engine.kernels.draw import Turns
from worker.engine.kernels.library import load
from worker.engine.kernels.linear import Epilogue, LinearArguments
from worker.engine.kernels.program import Step

_ALIGNMENT = 64


class _Arguments(ctypes.Structure):
    """As in draw.cpp."""

    _fields_: ClassVar = [(name, c_void_p) for name in ("seen", "token_ids", "peaks")] + [("num_rows", c_int64)]


class HighestOutputs:
    """`step` comes behind the layer in a program, and does nothing unless `ask` came before the run. Raises
    KernelUnavailableError where it cannot be compiled.
    """

    def __init__(self) -> None:
        library = load("draw")
        library.tokenmill_highest_bytes.restype = library.tokenmill_highest_rows.restype = c_int64
        self._bytes: int = library.tokenmill_highest_bytes()  # of a thread
        self.most_rows: int = library.tokenmill_highest_rows()
        self._seen = torch.zeros(0, dtype=torch.uint8)
        self._arguments = _Arguments()
        self._turns = Turns(0)
        self.step = Step(library.tokenmill_highest_member, self._arguments)

    def ask(self, layer: LinearArguments, num_rows: int, num_threads: int) -> tuple[Tensor, Tensor]:
        """Let the next run leave column ids `[rows]` int64 and the highest outputs `[rows]`, NaN where one is, of up to
        `most_rows` rows. Both stay for two calls more.
        """
        if self._seen.numel() < num_threads * self._bytes + _ALIGNMENT:
            self._seen = torch.zeros(num_threads * self._bytes + _ALIGNMENT, dtype=torch.uint8)
        start = self._seen.data_ptr()
        start += -start % _ALIGNMENT
        if self._turns.num_rows != num_rows:
            self._turns = Turns(num_rows)
        layer.epilogue, layer.y = int(Epilogue.HIGHEST), start
        arguments = self._arguments
        arguments.seen, arguments.num_rows = start, num_rows
        token_ids, peaks, arguments.token_ids, arguments.peaks = self._turns.next()
        return token_ids, peaks

    def dismiss(self, layer: LinearArguments) -> None:
        """The layer stores its outputs, as before."""
        layer.epilogue, self._arguments.num_rows = int(Epilogue.PLAIN), 0
