"""What a device can do at best, measured: bytes read per second by a large reduction-free pass, operations per second
by a large matrix product. It knows no model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ceilings:
    bytes_s: float
    operations_s: float


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of several tries each: a ceiling is what was reached once."""
    on_gpu = device.type == "cuda"
    size = (1 << 30) if on_gpu else (1 << 26)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = _best(lambda: target.copy_(source), device)
    width = 8192 if on_gpu else 1024
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    multiplied = _best(lambda: left @ right, device)
    return Ceilings(bytes_s=2 * size / copied, operations_s=2 * width**3 / multiplied)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds."""
    times = []
    for _ in range(12):
        synchronise(device)
        started = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - started)
    return min(times[2:])
