"""Joins the ranks of one tensor-parallel model: common sizes, broadcasts, common failure.

A thin layer over torch.distributed. The model's collectives run in the default group (gloo on CPU,
NCCL on CUDA). Rank 0's messages use a gloo group of its own: its members may wait as long as the
engine is idle, and it does not use the device.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.config.cache import CacheConfig
from tokenmill_worker.engines.own.errors import why

log = logging.getLogger(__name__)

IDLE_TIMEOUT = timedelta(days=365)  # an idle engine sends nothing to its ranks
FAILED = "tokenmill/failed"
LOOK_EVERY_S = 0.5
GROUP_LOST = 5  # exit status of a rank that ends because another one failed


class GroupLostError(RuntimeError):
    """A rank failed inside a step, so that all ranks must end.

    The others wait in a collective that never completes.
    """


class Ranks:
    """This process's membership in the group.

    `on_loss` is called, in a thread, when another rank has failed.
    """

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        self.rank = dist.get_rank()
        self._control = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        # torch has no public access to the group's store
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._on_loss = on_loss
        self.is_lost = False
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @classmethod
    def join(cls, device: str, on_loss: Callable[[str], None] | None = None) -> Ranks:
        """Enter the process group that torchrun describes.

        Raises EngineConfigError outside torchrun.
        """
        if not dist.is_torchelastic_launched() and not dist.is_initialized():
            raise EngineConfigError(
                ["tensor_parallel needs torchrun: every rank makes the same call"]
            )
        on_cuda = device != "cpu" and torch.cuda.is_available()
        if on_cuda:
            torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if on_cuda else "gloo")
        return cls(on_loss or end_process)

    def fail(self, error: BaseException) -> GroupLostError:
        """Report this error to the other ranks; return the error to raise instead."""
        reason = f"rank {self.rank} failed in a step: {why(error)}"
        self.is_lost = True
        self._over.set()
        try:
            self._store.set(FAILED, reason)
        except Exception as problem:
            # the store's process is gone, which the other ranks notice themselves
            log.warning("This rank cannot report its failure to the other ranks: %s", problem)
        return GroupLostError(reason)

    def leave(self) -> None:
        """Leave the group.

        A lost group is not left, because its collectives never end; the end of the process leaves
        it.
        """
        if self.is_lost:
            return
        self._over.set()
        self._watcher.join()
        dist.destroy_process_group()

    def broadcast(self, payload: bytes | None) -> bytes:
        """Send rank 0's payload to all ranks and return it: first its length, then its bytes.

        The other ranks pass None.
        """
        length = torch.tensor([len(payload or b"")], dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._control)
        data: Tensor = torch.empty(int(length.item()), dtype=torch.uint8)
        if payload is not None:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(data, src=0, group=self._control)
        return bytes(data.numpy().tobytes())

    def _watch(self) -> None:
        """Poll the store for a failed rank's message; a store that is gone counts as a failure."""
        while not self._over.wait(LOOK_EVERY_S):
            try:
                reason = self._store.get(FAILED).decode() if self._store.check([FAILED]) else None
            except Exception as error:
                reason = f"the ranks' store is gone: {error}"
            if reason is not None and not self._over.is_set():
                self._on_loss(reason)
                return


def smallest_common_cache(cache: CacheConfig) -> CacheConfig:
    """Return the smallest pools of all ranks: a block id must mean the same on each of them."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    sizes = torch.tensor([cache.num_blocks, cache.num_host_blocks], device=device)
    dist.all_reduce(sizes, dist.ReduceOp.MIN)
    num_blocks, num_host_blocks = sizes.tolist()
    return replace(cache, num_blocks=num_blocks, num_host_blocks=num_host_blocks)


def end_process(reason: str) -> None:
    """Exit at once: the main thread may be in a collective that never completes."""
    log.critical("This rank ends: %s", reason)
    os._exit(GROUP_LOST)
