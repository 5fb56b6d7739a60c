"""The ranks of one tensor-parallel model: joining, agreeing on sizes, and bytes from rank 0 to all.

A thin layer over torch.distributed (gloo on CPU, NCCL on CUDA). It knows no plan and no model.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from worker.engine.config import CacheConfig, EngineConfigError


def join(device: str) -> int:
    """Enter the process group that torchrun describes; this process's rank. Raises EngineConfigError without one."""
    if not dist.is_torchelastic_launched() and not dist.is_initialized():
        raise EngineConfigError(["tensor_parallel needs torchrun: every rank makes the same call"])
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" or not torch.cuda.is_available() else "nccl")
    return dist.get_rank()


def leave() -> None:
    dist.destroy_process_group()


def agree(cache: CacheConfig) -> CacheConfig:
    """The smallest pools of all ranks: block ids must mean the same everywhere."""
    sizes = torch.tensor([*cache.num_blocks, *cache.num_host_blocks], device=_device())
    dist.all_reduce(sizes, dist.ReduceOp.MIN)
    counts = tuple(int(size) for size in sizes.tolist())
    groups = len(cache.groups)
    return CacheConfig(cache.block_size, cache.groups, counts[:groups], counts[groups:], cache.prefix_cache)


def broadcast(payload: bytes | None) -> bytes:
    """Rank 0 gives the payload, the others None; all get it: its length first, then its bytes."""
    device = _device()
    length = torch.tensor([len(payload or b"")], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0)
    data: Tensor = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    if payload is not None:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    return bytes(data.cpu().numpy().tobytes())


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
