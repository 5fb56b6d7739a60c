"""Measures the best rates of a device: the floor of a step is counted with them.

Bytes per second come from large copies and reads, operations per second from a large matrix product
of random numbers.
"""

import time
from collections.abc import Callable

import torch

from ops.benchmarks.measure.step_floor import Ceilings

# Calls between two readings of the clock. On a GPU, launch costs would count otherwise.
REPEATS = {"cuda": 8, "cpu": 1}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return the best of several tries for each rate."""
    on_gpu = device.type == "cuda"
    size = (4 << 30) if on_gpu else (1 << 26)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = 2 * size / _best(lambda: target.copy_(source), device)
    read = size / _best(lambda: torch.sum(source), device)
    width = 8192 if on_gpu else 1024
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    multiplied = _best(lambda: torch.mm(left, right, out=product), device)
    return Ceilings(max(copied, read), 2 * width**3 / multiplied, copied, read)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of one call, in seconds."""
    times, repeats = [], REPEATS[device.type]
    for _ in range(6):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronise(device)
        times.append((time.perf_counter() - started) / repeats)
    return min(times[1:])
