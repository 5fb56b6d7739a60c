"""The ranks of one tensor-parallel model: joining, agreeing on sizes, bytes from rank 0 to all, and failing as one.

A thin layer over torch.distributed. The model's collectives run in the default group (gloo on CPU, NCCL on CUDA);
what rank 0 tells the others goes through a gloo group of its own, whose members may wait for as long as the engine
is idle, and which asks nothing of the device. It knows no plan and no model.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from worker.engine.config import CacheConfig, EngineConfigError

log = logging.getLogger(__name__)

PATIENCE = timedelta(days=365)  # an engine without work says nothing to its ranks
FAILED = "tokenmill/failed"
LOOK_EVERY_S = 0.5
GROUP_LOST = 5  # exit status of a rank that ends because another one failed


class GroupLostError(RuntimeError):
    """A rank failed inside a step: the others wait in a collective that will never be, so all of them must end."""


class Ranks:
    """This process's place among the ranks. `on_loss` is called, in a thread, when another rank has failed."""

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        self.rank = dist.get_rank()
        self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._store: Any = dist.distributed_c10d._get_default_store()  # there is no public way to the group's store
        self._on_loss = on_loss
        self.is_lost = False
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @classmethod
    def join(cls, device: str, on_loss: Callable[[str], None] | None = None) -> Ranks:
        """Enter the process group that torchrun describes. Raises EngineConfigError where there is none."""
        if not dist.is_torchelastic_launched() and not dist.is_initialized():
            raise EngineConfigError(["tensor_parallel needs torchrun: every rank makes the same call"])
        on_cuda = device != "cpu" and torch.cuda.is_available()
        if on_cuda:
            torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if on_cuda else "gloo")
        return cls(on_loss or end_process)

    def fail(self, error: BaseException) -> GroupLostError:
        """Tell the others; the error to raise in place of this one."""
        reason = f"rank {self.rank} failed in a step: {type(error).__name__}: {error}"
        self.is_lost = True
        self._over.set()
        try:
            self._store.set(FAILED, reason)
        except Exception as problem:  # then the store is gone, and with it whoever kept it: the others see that
            log.warning("the other ranks could not be told: %s", problem)
        return GroupLostError(reason)

    def leave(self) -> None:
        """A lost group is left by the end of the process: its collectives never end."""
        if self.is_lost:
            return
        self._over.set()
        self._watcher.join()
        dist.destroy_process_group()

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0 gives the payload, the others None; all get it: its length first, then its bytes."""
        length = torch.tensor([len(payload or b"")], dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._control)
        data: Tensor = torch.empty(int(length.item()), dtype=torch.uint8)
        if payload is not None:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(data, src=0, group=self._control)
        return bytes(data.numpy().tobytes())

    def _watch(self) -> None:
        """Look for the note of a failed rank. A store that is gone says the same."""
        while not self._over.wait(LOOK_EVERY_S):
            try:
                reason = self._store.get(FAILED).decode() if self._store.check([FAILED]) else None
            except Exception as error:
                reason = f"the ranks' store is gone: {error}"
            if reason is not None and not self._over.is_set():
                self._on_loss(reason)
                return


def agree(cache: CacheConfig) -> CacheConfig:
    """The smallest pools of all ranks: block ids must mean the same everywhere."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    sizes = torch.tensor([*cache.num_blocks, *cache.num_host_blocks], device=device)
    dist.all_reduce(sizes, dist.ReduceOp.MIN)
    counts = tuple(int(size) for size in sizes.tolist())
    groups = len(cache.groups)
    return CacheConfig(cache.block_size, cache.groups, counts[:groups], counts[groups:], cache.prefix_cache)


def end_process(reason: str) -> None:
    """Its main thread may sit in a collective that nothing ends: only the process can."""
    log.critical("this rank ends: %s", reason)
    os._exit(GROUP_LOST)
