"""Allocates host memory in huge pages for data that every step reads: weights and KV cache.

With 4 KiB pages, reading half a gigabyte waits longer for address translation than for memory,
above all in a virtual machine. Where huge pages are unavailable (not Linux, disabled) it is
ordinary memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: a cache line
_CHUNK = 64 << 20
_SLICE = 4 << 20  # bytes: during a call, the process maps no other memory
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE


def zeros(num_bytes: int) -> Tensor:
    """Return a zeroed uint8 tensor `[num_bytes]`.

    Parts that are never touched take no memory, in units of a huge page.
    """
    if num_bytes == 0 or not sys.platform.startswith("linux"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # the kernel has no huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    # the tensor keeps the area alive
    return torch.frombuffer(area, dtype=torch.uint8, count=num_bytes)


def populate(memory: Tensor) -> threading.Thread:
    """Give memory its pages from a thread beside the caller, so that fewer writes wait for them.

    What the memory holds stays as it is. The thread ends when the memory is freed, and at the first
    error: a kernel before Linux 5.14 does not know the call, and pages come at first use.
    """
    thread = threading.Thread(
        target=_populate, args=(weakref.ref(memory),), name="pages", daemon=True
    )
    thread.start()
    return thread


def _populate(reference: weakref.ref[Tensor]) -> None:
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    while (memory := reference()) is not None:
        begin = memory.data_ptr() + done
        end = memory.data_ptr() + memory.numel() * memory.element_size()
        begin += -begin % mmap.PAGESIZE  # a part of a page stays for its first write
        count = min(_SLICE, end - begin)
        if count <= 0 or madvise(begin, count, _POPULATE_WRITE) != 0:
            return
        done = begin + count - memory.data_ptr()
        del memory


class HugePageArena:
    """Allocates tensors from large areas, because many weights are smaller than a huge page.

    An area is freed with the last tensor in it.
    """

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)
        self._taken = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed tensor `[count]` of `dtype` that starts at a cache line."""
        num_bytes = count * dtype.itemsize
        if self._taken + num_bytes > self._area.numel():
            self._area, self._taken = zeros(max(num_bytes, _CHUNK)), 0
        piece = self._area[self._taken : self._taken + num_bytes]
        self._taken += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece.view(dtype)
