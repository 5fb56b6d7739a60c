"""Copies small host arrays to the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Indices = npt.NDArray[np.int64]


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy like `upload`; on the CPU the result shares the array's memory."""
    return upload(torch.from_numpy(array), device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it.

    The copy goes through pinned memory: a copy from pageable memory would wait.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
