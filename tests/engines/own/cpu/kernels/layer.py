"""Fills a linear layer's arguments by hand, for tests of what only a program asks of it."""

from __future__ import annotations

from torch import Tensor, uint8
from torch import empty as empty_tensor

from tokenmill_worker.engines.own.cpu.kernels.linear import Epilogue, LinearArguments, PackedWeight


def arguments_of(packed: PackedWeight, x: Tensor) -> tuple[LinearArguments, Tensor]:
    """Return the kernel's arguments for the rows `[m, k]`, without outputs, and their workspace.

    The workspace must be kept alive while the arguments are used.
    """
    workspace = empty_tensor(x.shape[0] * packed.row_bytes, dtype=uint8)
    arguments = packed.arguments(Epilogue.PLAIN)
    arguments.x, arguments.x_stride, arguments.m = x.data_ptr(), x.stride(0), x.shape[0]
    arguments.workspace = workspace.data_ptr()
    return arguments, workspace


def refuse(answer: int) -> None:
    """Fail the test: a program's kernels must give no answer."""
    raise AssertionError(f"a kernel answered {answer}")
