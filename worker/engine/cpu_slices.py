"""Lets whoever wakes up pass the threads that compute: they ask Linux for longer slices of a core, not for fewer.

Computing threads hold all cores, so that the I/O process, the queue's server and a subscriber, awake for a moment per
step, wait at each hand-over of a token until the scheduler takes a core away. Since Linux 6.12 a waking thread whose
slice is shorter than that of the running one takes its core at once, and both still get their fair share. Elsewhere
nothing changes: older kernels ignore the request.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Final

COMPUTE_SLICE_MS: Final = 20  # the kernel's own is 0.7 to 3 ms; 100 is the longest that it takes
_SCHED_OTHER: Final = 0
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}  # the system call's number; the C library has no name for it
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, slice ns, deadline, period


def lengthen_slices(slice_ms: float = COMPUTE_SLICE_MS) -> bool:
    """Of the calling thread, and of those that it starts from now on. False: it cannot be asked for here."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != _SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, _SCHED_OTHER, 0, nice, 0, round(slice_ms * 1e6), 0, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(ctypes.c_long(number), ctypes.c_long(0), ctypes.c_char_p(wanted), ctypes.c_long(0)) == 0)
