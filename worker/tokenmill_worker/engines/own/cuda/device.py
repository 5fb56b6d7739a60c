"""Describes CUDA devices: modules and sampling in Triton, CUDA graphs, pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.cuda.fused import fuse_where_possible
from tokenmill_worker.engines.own.cuda.graphs import (
    CudaCapture,
    GraphRunner,
    graph_sizes,
)
from tokenmill_worker.engines.own.cuda.pinned_pool import PinnedPool
from tokenmill_worker.engines.own.device import Device, Forward, GraphSizes, cannot_quantize
from tokenmill_worker.engines.own.sampling.draws import Kernel


class CudaDevice(Device):
    is_asynchronous = True

    def __init__(self, torch_device: torch.device) -> None:
        """Make the device current: Triton launches kernels on the thread's current device."""
        if str(torch_device) == "cuda":
            torch_device = torch.device("cuda", torch.cuda.current_device())
        else:
            torch.cuda.set_device(torch_device)
        super().__init__(torch_device)

    def replace_modules(self, model: nn.Module, config: EngineConfig) -> None:
        if config.quantization is not None and not self._can_quantize(model, config):
            raise cannot_quantize(config, next(model.parameters()))
        fuse_where_possible(model, config)
        if config.quantization is not None:
            from tokenmill_worker.engines.own.cuda.fused.fp8 import quantize_products

            quantize_products(model, config.model)

    def _can_quantize(self, model: nn.Module, config: EngineConfig) -> bool:
        """Return whether torch multiplies in 8 bits with a scale per row here."""
        return (
            config.quantization == "fp8"
            and next(model.parameters()).dtype == torch.bfloat16
            and torch.cuda.get_device_capability(self.torch_device) >= (8, 9)
            and find_spec("triton") is not None
        )

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        free, _total = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def peak_memory(self, run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        run()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def pin(self, tensors: Seq[Tensor]) -> PinnedPool:
        return PinnedPool(tensors, torch.cuda.cudart())  # type: ignore[no-untyped-call]

    def copy_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def _staging(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return pinned memory; torch reuses it only after the copy from it is done."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def token_kernel(self, config: EngineConfig) -> Kernel | None:
        if not config.fuse or find_spec("triton") is None:
            return None
        from tokenmill_worker.engines.own.cuda.draw import DeviceDraw

        return DeviceDraw(self.torch_device)

    def graphs(
        self, forward: Forward, config: EngineConfig, max_model_len: int
    ) -> GraphRunner | None:
        if not config.cuda_graphs:
            return None
        return GraphRunner(forward, config, max_model_len, CudaCapture(self.torch_device))

    def graph_sizes(self, config: EngineConfig, max_model_len: int) -> GraphSizes:
        return graph_sizes(config, max_model_len)

    def end_of_queue(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_alive(self) -> bool:
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError:
            return False
        return True
