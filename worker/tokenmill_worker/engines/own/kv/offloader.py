"""Moves blocks from device to host and from host to device, in few large operations.

On CUDA the host pool is pinned and transfers run on a stream of their own. Leaving blocks are first
gathered on the compute stream, so that the step may overwrite them at once. The compute stream
waits for arriving blocks. Because all transfers share one stream, a host block may be read and then
reused without further synchronization. Block ids are copied from pinned memory too, so the host
never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from tokenmill_worker.engines.own.device import PinnedMemory
from tokenmill_worker.engines.own.kv.tensors import KVCachePool
from tokenmill_worker.engines.own.plan import BlockCopy, StepPlan

MAX_STAGING_BYTES = 256 << 20  # largest part that moves at once; bounds the staging memory


class Offloader:
    """Copies blocks between a device pool and a host pool.

    `host_pool` is None without offload; plans then must hold no swaps. `stream` carries the
    transfers of a CUDA device; without it copies are synchronous. `pinned` is the host pool's
    memory, if it is pinned.
    """

    def __init__(
        self,
        device_pool: KVCachePool,
        host_pool: KVCachePool | None,
        stream: torch.cuda.Stream | None = None,
        max_staging_bytes: int = MAX_STAGING_BYTES,
        pinned: PinnedMemory | None = None,
    ) -> None:
        self._pinned = pinned
        self._stream = stream
        self._device_blocks = _movable(device_pool)
        self._host_blocks = None if host_pool is None else _movable(host_pool)
        self._part = max(1, max_staging_bytes // self._device_blocks[0].nbytes)

    def run(self, plan: StepPlan) -> None:
        """Move the plan's blocks, first out, then in. Call it before the step's forward pass."""
        if not (plan.swap_out or plan.swap_in):
            return
        if self._host_blocks is None:
            raise RuntimeError(
                "the plan moves blocks to or from the host, but there is no host pool"
            )
        for sources, targets in self._parts(plan.swap_out, _target):
            self._move_out(self._device_blocks, self._host_blocks, sources, targets)
        for sources, targets in self._parts(plan.swap_in, _source):
            self._move_in(self._device_blocks, self._host_blocks, sources, targets)

    def _parts(
        self, copies: Seq[BlockCopy], place: Callable[[BlockCopy], int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (sources, targets) in parts that fit the staging memory.

        Copies are sorted by `place`, the host's block id, so that consecutive host blocks form
        runs.
        """
        ordered = sorted(copies, key=place)
        for start in range(0, len(ordered), self._part):
            part = ordered[start : start + self._part]
            yield [copy.source for copy in part], [copy.target for copy in part]

    def _move_out(self, pool: Tensor, host: Tensor, sources: list[int], targets: list[int]) -> None:
        leaving = pool.index_select(0, _ids(sources, pool))
        if self._stream is None:
            host.index_copy_(0, _ids(targets, host), leaving)
            return
        self._stream.wait_stream(torch.cuda.current_stream(pool.device))
        with torch.cuda.stream(self._stream):
            for start, stop in runs(targets):
                host[targets[start] : targets[start] + stop - start].copy_(
                    leaving[start:stop], non_blocking=True
                )
            leaving.record_stream(self._stream)

    def _move_in(self, pool: Tensor, host: Tensor, sources: list[int], targets: list[int]) -> None:
        if self._stream is None:
            pool.index_copy_(0, _ids(targets, pool), host.index_select(0, _ids(sources, host)))
            return
        compute = torch.cuda.current_stream(pool.device)
        with torch.cuda.stream(self._stream):
            arriving = torch.empty(
                (len(sources), *pool.shape[1:]), dtype=pool.dtype, device=pool.device
            )
            for start, stop in runs(sources):
                arriving[start:stop].copy_(
                    host[sources[start] : sources[start] + stop - start], non_blocking=True
                )
        compute.wait_stream(self._stream)
        pool.index_copy_(0, _ids(targets, pool), arriving)
        arriving.record_stream(compute)

    def synchronize(self) -> None:
        """Wait until all transfers are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Wait until all transfers are done, then unpin the host pool."""
        self.synchronize()
        if self._pinned is not None:
            self._pinned.close()


def _movable(pool: KVCachePool) -> Tensor:
    """View blocks of 8-bit floats as bytes.

    Torch cannot index-copy 8-bit floats on every device.
    """
    return pool.blocks.view(torch.uint8) if pool.blocks.dtype.itemsize == 1 else pool.blocks


def runs(block_ids: list[int]) -> Iterator[tuple[int, int]]:
    """Yield index ranges [start, stop) of block ids that count up by one: each is one copy."""
    start = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            if index > start:
                yield start, index
            start = index


def _source(copy: BlockCopy) -> int:
    return copy.source


def _target(copy: BlockCopy) -> int:
    return copy.target


def _ids(block_ids: list[int], pool: Tensor) -> Tensor:
    ids = torch.tensor(block_ids, dtype=torch.int64)
    return ids.pin_memory().to(pool.device, non_blocking=True) if pool.is_cuda else ids
