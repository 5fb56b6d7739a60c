"""Programmatic dependent launch: the next kernel of a step starts while the current one still runs.

Its programs take the places that the current kernel leaves free, load what no kernel of the step
writes (weights, lengths, block tables), and then wait for the current kernel's end. Before that
they must write nothing. Devices have it from compute capability 9.0 on. A kernel of torch lets no
other start before it has ended.

A kernel that is launched with `overlap_of` must call both functions, in every program and before
any `return`: the end of a kernel whose programs have not waited says nothing about the kernels
before it.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from functools import lru_cache

import torch
import triton
import triton.language as tl


@triton.jit
def start_next_kernel(OVERLAPS: tl.constexpr):
    """Let the next kernel start when all programs of this one have started."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous_kernel(OVERLAPS: tl.constexpr):
    """Wait until the kernel before this one has ended and what it wrote can be read."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@lru_cache
def overlap_of(device: torch.device) -> dict[str, bool]:
    """Return the arguments of a launch on this device."""
    overlaps = (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] >= 9
        and hasattr(tl.extra.cuda, "gdc_wait")  # Triton 3.4 or later
    )
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}
