"""Requests longer time slices for compute threads, so that waking I/O threads preempt them at once.

Compute threads hold all cores. The I/O process, the queue's server and subscribers wake for a
moment per step, and without longer slices wait at each token until the scheduler frees a core.
Since Linux 6.12 a waking thread with a shorter slice than the running one gets its core at once;
both still receive their fair share. Older kernels ignore the request.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Final

COMPUTE_SLICE_MS: Final = 20  # the kernel's default is 0.7 to 3 ms, its maximum 100
_SCHED_OTHER: Final = 0
# system call numbers; the C library has no wrapper
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
# size, policy, flags, nice, priority, slice ns, deadline, period
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")


def lengthen_slices(slice_ms: float = COMPUTE_SLICE_MS) -> bool:
    """Lengthen the slices of the calling thread and of threads that it starts from now on.

    Return False where the system does not support or does not accept the request.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != _SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(
        _ATTRIBUTES.size, _SCHED_OTHER, 0, nice, 0, round(slice_ms * 1e6), 0, 0
    )
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(
        call(ctypes.c_long(number), ctypes.c_long(0), ctypes.c_char_p(wanted), ctypes.c_long(0))
        == 0
    )
