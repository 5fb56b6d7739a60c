"""Host memory is registered with the driver where it lies, and unregistered again."""

import pytest
import torch

from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.cuda.pinned_pool import PinnedPool


class Runtime:
    """Stands in for the CUDA runtime's memory pinning; it has memory for `room` registrations."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        if len(self.registered) == self.room:
            return 2
        self.registered[pointer] = size
        return flags

    def cudaHostUnregister(self, pointer: int) -> None:
        del self.registered[pointer]


def test_a_host_pool_is_pinned_in_place_and_unpinned() -> None:
    host, runtime = (torch.zeros(5), torch.zeros(3)), Runtime(room=2)
    pinned = PinnedPool(host, runtime)
    assert runtime.registered == {tensor.data_ptr(): tensor.nbytes for tensor in host}
    pinned.close()
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_a_settings_error() -> None:
    runtime = Runtime(room=1)
    with pytest.raises(
        EngineConfigError, match=r"cpu_offload_gib: the driver cannot pin .* error 2"
    ):
        PinnedPool((torch.zeros(5), torch.zeros(3)), runtime)
    assert not runtime.registered
