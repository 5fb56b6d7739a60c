"""Describes the CPU: packed weights, kernels in C++, memory in huge pages, reused inputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.cpu import huge_pages
from tokenmill_worker.engines.own.cpu.decode_inputs import DecodeInputs
from tokenmill_worker.engines.own.cpu.fused import find_whole_pass, prepare_weights
from tokenmill_worker.engines.own.cpu.kernels.draw import DrawKernel
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError
from tokenmill_worker.engines.own.device import Device, FusedPass, StepInputs
from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sampling.draws import Kernel

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class CpuDevice(Device):
    uses_host_memory = True

    def __init__(self, torch_device: torch.device = _CPU) -> None:
        super().__init__(torch_device)

    def weight_type(self, stored: torch.dtype | None) -> torch.dtype:
        return torch.float32

    def replace_modules(self, model: nn.Module, config: EngineConfig) -> FusedPass | None:
        return find_whole_pass(prepare_weights(model, config))

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeroed memory; parts that are never written take none, in units of a huge page."""
        return huge_pages.zeros(num_bytes)

    def upload(
        self, arrays: Seq[npt.NDArray[Any]], kind: type[np.int64 | np.int32]
    ) -> list[Tensor]:
        """Return the arrays as tensors, which share their memory."""
        return [torch.from_numpy(array.astype(kind, copy=False)) for array in arrays]

    def repeated_inputs(
        self, items: Seq[ScheduledSequence], inputs: StepInputs
    ) -> DecodeInputs | None:
        return DecodeInputs(items, inputs)

    def token_kernel(self, config: EngineConfig) -> Kernel | None:
        try:
            return DrawKernel()
        except KernelUnavailableError as error:
            log.warning(
                "No sampling kernel; torch samples the tokens, several times slower: %s",
                error,
            )
            return None
