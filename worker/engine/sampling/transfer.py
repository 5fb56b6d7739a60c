"""Small arrays of the host on their way to the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Indices = npt.NDArray[np.int64]


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy without waiting for the device: a copy from pageable memory would. On the CPU the array itself."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
