"""Shows where a device's time goes: kernels by name, and gaps by the two kernels around them.

Times come from torch's profiler. Entries below 2 % of the profiled time are left out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ops.benchmarks.gpu.ceilings import synchronise

LEAST_SHARE = 0.02


def profile_of(step: Callable[[], object], device: torch.device, steps: int) -> dict[str, Any]:
    """Profile steps.

    `busy` is the share of the time in which the device worked; `kernels` and `gaps` are per step,
    largest first.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            step()
        synchronise(device)
    wanted = "CUDA" if device.type == "cuda" else "CPU"  # a CPU has operators and no kernels
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or ()
        if event.device_type.name == wanted and (wanted == "CUDA" or event.cpu_parent is None)
    ]
    return summarise(spans, steps)


def summarise(spans: Iterable[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Sum up spans (start, end, name), in microseconds, in any order; they may overlap."""
    ordered = sorted(spans)
    if not ordered:
        return {"busy": 0.0, "kernels": [], "gaps": []}
    idle: defaultdict[str, float] = defaultdict(float)
    worked: defaultdict[str, float] = defaultdict(float)
    for start, end, name in ordered:
        worked[name] += end - start
    first, reached, last = ordered[0]
    for start, end, name in ordered[1:]:
        if start > reached:
            idle[f"{last} → {name}"] += start - reached
        if end > reached:
            reached, last = end, name
    whole = reached - first
    kernels = [(name, took) for name, took in _largest(worked) if took > LEAST_SHARE * whole]
    named = sorted(
        ((took, between) for between, took in idle.items() if took > LEAST_SHARE * whole),
        reverse=True,
    )
    return {
        "busy": 1.0 - sum(idle.values()) / whole,
        "step_ms": whole / 1e3 / steps,
        "kernels": [
            {"name": n, "ms": took / 1e3 / steps, "share": took / whole} for n, took in kernels
        ],
        "gaps": [
            {"between": b, "ms": took / 1e3 / steps, "share": took / whole} for took, b in named
        ],
    }


def _largest(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda pair: -pair[1])
