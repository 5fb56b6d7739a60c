"""Host memory in huge pages, for what is read whole at every step: packed weights and the CPU's KV cache.

With pages of 4 KiB a pass over half a gigabyte waits for address translation more than for memory, in a virtual
machine above all. Where huge pages are not to be had (not Linux, switched off), it is common memory.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: a cache line
_CHUNK = 64 << 20


def zeros(num_bytes: int) -> Tensor:
    """`[num_bytes]` uint8, zero. What is never touched takes no memory, in units of a huge page."""
    if num_bytes == 0 or not sys.platform.startswith("linux"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8, count=num_bytes)  # keeps the area


class Arena:
    """Hands out pieces of large areas, since a huge page is larger than many a weight. An area is freed with the last
    tensor in it.
    """

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)
        self._taken = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """`[count]` of `dtype`, zero, at the start of a cache line."""
        num_bytes = count * dtype.itemsize
        if self._taken + num_bytes > self._area.numel():
            self._area, self._taken = zeros(max(num_bytes, _CHUNK)), 0
        piece = self._area[self._taken : self._taken + num_bytes]
        self._taken += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece.view(dtype)
