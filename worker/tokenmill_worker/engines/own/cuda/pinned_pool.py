"""Pins host memory page by page, through the CUDA driver."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from tokenmill_worker.engines.own.config import EngineConfigError


class PinnedPool:
    """Pins the tensors of a host pool for direct access by the device, until `close`.

    The pool's pages are registered with the driver: torch's own pinned allocations are rounded up
    to powers of two, up to twice the memory of a large pool. `runtime` is the CUDA runtime.
    """

    def __init__(self, tensors: Seq[Tensor], runtime: Any) -> None:
        self._runtime = runtime
        self._registered: list[int] = []
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            status = int(runtime.cudaHostRegister(tensor.data_ptr(), size, 0)) if size else 0
            if status:
                self.close()
                reason = (
                    f"the driver cannot pin {size / 2**30:.1f} GiB of host memory "
                    f"(CUDA error {status})"
                )
                raise EngineConfigError([f"cpu_offload_gib: {reason}"])
            self._registered.append(tensor.data_ptr())

    def close(self) -> None:
        """Unregister the pages.

        Call it before the memory is freed: pages that are still registered cannot be registered
        again by their next owner.
        """
        while self._registered:
            self._runtime.cudaHostUnregister(self._registered.pop())
