"""Where a device stands idle between kernels: gaps summed by the two kernels that they lie between.

From torch's profiler. A gap is named only if it is more than 2 % of the profiled time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ops.benchmarks.device_ceilings import synchronise

LEAST_SHARE = 0.02


def gaps_of(step: Callable[[], object], device: torch.device, steps: int) -> dict[str, Any]:
    """`busy`: share of the time in which the device worked; `gaps`: the named ones, per step, largest first."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            step()
        synchronise(device)
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return summarise(spans, steps)


def summarise(spans: Iterable[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Spans are (start, end, name) in microseconds, in any order; they may overlap."""
    ordered = sorted(spans)
    if not ordered:
        return {"busy": 0.0, "gaps": []}
    idle: defaultdict[str, float] = defaultdict(float)
    first, reached, last = ordered[0]
    for start, end, name in ordered[1:]:
        if start > reached:
            idle[f"{last} → {name}"] += start - reached
        if end > reached:
            reached, last = end, name
    whole = reached - first
    named = sorted(((took, between) for between, took in idle.items() if took > LEAST_SHARE * whole), reverse=True)
    return {
        "busy": 1.0 - sum(idle.values()) / whole,
        "gaps": [{"between": b, "ms": took / 1e3 / steps, "share": took / whole} for took, b in named],
    }
