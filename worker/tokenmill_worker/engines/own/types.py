"""The order in which the engine runs requests, and the report of its progress."""

from collections.abc import Callable
from enum import StrEnum

ProgressCallback = Callable[[str, float], None]  # (what is loaded, fraction that is done)


class SchedulingPolicy(StrEnum):
    FIFO = "fifo"
    PREFILL_FIRST = "prefill_first"
    PRIORITY = "priority"
