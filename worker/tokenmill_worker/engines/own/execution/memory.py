"""Measures free memory and sizes the cache: collects the inputs of `kv.sizing` for this machine.

On CUDA the activations are measured by one pass of the largest step. On CPU they are estimated, and
the pool stays small unless `max_memory_gib` is set, since other programs use the memory too.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Literal

import torch

from tokenmill_worker.engines.own.attention import AttentionBackend
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.config.cache import CacheConfig
from tokenmill_worker.engines.own.config.machine import available_memory
from tokenmill_worker.engines.own.device import Device
from tokenmill_worker.engines.own.kv.sizing import (
    DoesNotFitError,
    MemoryShape,
    solve,
)
from tokenmill_worker.engines.own.model.loader import LoadedModel
from tokenmill_worker.engines.own.model.paged_attention import Probe
from tokenmill_worker.engines.own.model.recurrent_states import STATE_SLOTS
from tokenmill_worker.engines.own.plan import MAX_DRAFTS, MAX_SCORED

log = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30
CPU_POOL_BYTES = 4 * GIB
SHORTEST = 256  # unasked, the length is not reduced below this many tokens
_MEASURED_MARGIN = 1.1
_AUTO_SHARE = 0.8  # of the free memory, for the host pool
_DISK_SHARE = 1 / 8  # of the free memory, unasked, for the host pool above a cache on disk
_READ_AT_ONCE = 4  # sequences of the longest length, unasked
_FEWEST_FOR_DISK = 8  # blocks, half of which may wait to be written
_STEP_SHARE = 0.25  # of the memory that may be used, for all that a step needs beside the cache
_FEWEST_TOKENS, _FEWEST_SEQS = 256, 16  # unasked, the limits of a step are not lowered below these


def size_cache(
    loaded: LoadedModel,
    config: EngineConfig,
    backend: AttentionBackend,
    kv_dtype: torch.dtype,
    may_shorten: bool,
) -> tuple[CacheConfig, int]:
    """Return the cache's shape, and the longest sequence: the model's length, or what memory holds.

    Raises EngineConfigError if the memory holds too little and `may_shorten` is false, if it holds
    fewer than SHORTEST tokens, or if the host cannot provide `cpu_offload_gib`.
    """
    length = loaded.max_model_len
    shape = memory_shape(loaded, config, backend, kv_dtype, length)
    if config.num_blocks is not None:
        num_blocks = 1 + config.num_blocks  # and the reserved one
    else:
        budget = int(config.max_memory_percent * loaded.device.free_memory())
        budget -= _measured_surplus(loaded, shape)
        cap = _pool_cap(config, loaded.device, shape)
        try:
            num_blocks = solve(shape, budget, cap)
        except DoesNotFitError as error:
            if not may_shorten or error.longest < SHORTEST:
                raise EngineConfigError(
                    [_too_small(error.longest, length, budget, config)]
                ) from error
            length = error.longest
            num_blocks = solve(dataclasses.replace(shape, max_model_len=length), budget, cap)
    if loaded.state_bytes:
        log.info(
            "Recurrent states take %.1f MiB for each of %d sequences: %d copies of %.1f MiB",
            shape.state_bytes / MIB, config.max_num_seqs,
            _slots_of_states(config), loaded.state_bytes / MIB,
        )  # fmt: skip
    num_host = 0
    if config.cpu_offload_gib and not loaded.state_bytes:
        num_host = _host_pool(config.cpu_offload_gib, shape, num_blocks, loaded.device)
    if config.cache_disk and loaded.state_bytes:
        log.warning("cache_disk does nothing here: the model keeps recurrent states beside blocks")
    elif config.cache_disk:
        num_host = max(num_host, _blocks_for_disk(shape, length))
    return CacheConfig(
        config.block_size,
        loaded.groups,
        num_blocks,
        num_host,
        config.prefix_cache,
    ), length


def with_step_that_fits(
    given: EngineConfig,
    config: EngineConfig,
    loaded: LoadedModel,
    backend: AttentionBackend,
    kv_dtype: torch.dtype,
) -> EngineConfig:
    """Halve the limits of a step that `given` leaves open, until a step leaves room for the
    cache.
    """
    limit = _STEP_SHARE * config.max_memory_percent * loaded.device.free_memory()
    fitting, length = config, loaded.max_model_len
    while memory_shape(loaded, fitting, backend, kv_dtype, length).fixed > limit:
        seqs, tokens = fitting.max_num_seqs, fitting.max_num_batched_tokens
        if not given.max_num_seqs:
            seqs = min(seqs, max(_FEWEST_SEQS, seqs // 2))
        if not given.max_num_batched_tokens and config.enable_chunked_prefill:
            tokens = min(tokens, max(_FEWEST_TOKENS, seqs, tokens // 2))
        smaller = fitting.replace(max_num_seqs=seqs, max_num_batched_tokens=tokens)
        if smaller == fitting:
            break
        fitting = smaller
    if fitting != config:
        tokens, seqs = fitting.max_num_batched_tokens, fitting.max_num_seqs
        log.info("Memory is short: a step has at most %d tokens and %d sequences", tokens, seqs)
    return fitting


def _widest(size: int | list[int] | None) -> int:
    """Return the largest of sizes that a configuration gives for each layer, as Gemma 3n's does."""
    return max(size) if isinstance(size, list) else size or 0


def memory_shape(
    loaded: LoadedModel,
    config: EngineConfig,
    backend: AttentionBackend,
    kv_dtype: torch.dtype,
    length: int,
) -> MemoryShape:
    text = loaded.config
    experts = getattr(text, "num_experts_per_tok", None) or 1
    layer_size = _widest(getattr(text, "intermediate_size", None))
    expert_size = _widest(getattr(text, "moe_intermediate_size", None)) or layer_size
    inner = experts * (expert_size or getattr(text, "n_inner", None) or 4 * text.hidden_size)
    graphs = loaded.device.graph_sizes(config, length)
    return MemoryShape(
        groups=loaded.groups,
        block_size=config.block_size,
        kv_bytes=kv_dtype.itemsize,
        activation_bytes=loaded.dtype.itemsize,
        hidden_size=text.hidden_size,
        intermediate_size=max(inner, layer_size),
        query_size=max(shape.num_heads * shape.head_dim for shape in loaded.shapes.values()),
        vocab_size=loaded.vocab_size,
        max_num_tokens=config.max_num_batched_tokens,
        max_num_rows=min(config.max_num_batched_tokens, config.max_num_seqs + MAX_DRAFTS),
        max_scored_rows=min(config.max_num_batched_tokens, MAX_SCORED),
        max_num_seqs=config.max_num_seqs,
        max_model_len=length,
        workspace_bytes=max(
            backend.workspace_bytes(
                shape, config.max_num_batched_tokens, length, loaded.dtype.itemsize
            )
            for shape in set(loaded.shapes.values())
        ),
        num_buffer_sets=2 if config.async_batching else 1,
        graph_rows=graphs.num_rows,
        graph_tokens=graphs.num_tokens,
        state_bytes=_slots_of_states(config) * loaded.state_bytes,
    )


def _slots_of_states(config: EngineConfig) -> int:
    """Return how many recurrent states there are for each sequence, a checkpoint included."""
    return STATE_SLOTS + config.prefix_cache


def _pool_cap(config: EngineConfig, device: Device, shape: MemoryShape) -> int | None:
    if config.max_memory_gib is not None:
        return int(config.max_memory_gib * GIB)
    if device.uses_host_memory:
        return max(CPU_POOL_BYTES, shape.pool_bytes_for(shape.max_model_len))
    return None


@torch.inference_mode()
def _measured_surplus(loaded: LoadedModel, shape: MemoryShape) -> int:
    """Return the bytes by which the largest step exceeds the estimate, at least 0.

    Experts and unusual models need more. Where the device cannot measure it, the result is 0.
    """
    device = loaded.device

    def run() -> None:
        where = device.torch_device
        tokens = torch.zeros(shape.max_num_tokens, dtype=torch.int64, device=where)
        positions = torch.arange(shape.max_num_tokens, device=where) % shape.max_model_len
        loaded.logits(tokens, positions, positions[: shape.max_num_rows], Probe())

    peak = device.peak_memory(run)
    return max(0, int(peak * _MEASURED_MARGIN) - shape.activations - shape.logits)


def _host_pool(
    gib: float | Literal["auto"], shape: MemoryShape, num_blocks: int, device: Device
) -> int:
    """Return the host pool's blocks; raises EngineConfigError if they are too many or none."""
    free = available_memory()
    if gib == "auto":
        pool = num_blocks * shape.block_bytes
        free -= pool if device.uses_host_memory else 0
        return max(0, min(pool, int(_AUTO_SHARE * free))) // shape.block_bytes
    if gib * GIB > free:
        words = f"is more than the free memory of {free / GIB:.1f} GiB: lower it"
        raise EngineConfigError([f"cpu_offload_gib ({gib:g}) {words}"])
    found = int(gib * GIB) // shape.block_bytes
    if not found:
        words = "holds no block: raise it, or set 0"
        raise EngineConfigError([f"cpu_offload_gib ({gib:g}) {words}"])
    return found


def _blocks_for_disk(shape: MemoryShape, length: int) -> int:
    """Return the blocks of the smallest host pool above a disk: they hold a few sequences of this
    length, which are read at once, where that is a small part of the free memory.
    """
    most = int(_DISK_SHARE * available_memory()) // shape.block_bytes
    return max(_FEWEST_FOR_DISK, min(_READ_AT_ONCE * shape.blocks_for(length), most))


def _too_small(longest: int, length: int, budget: int, config: EngineConfig) -> str:
    cap = config.max_memory_gib
    if cap is not None and cap * GIB < budget:
        held = f"sequences of {longest} tokens, not {length}" if longest else "no sequence at all"
        return f"max_memory_gib ({cap:g}) holds {held}: raise it, or lower max_model_len"
    room = f"the KV cache's share of {budget / GIB:.2f} GiB"
    if longest:
        return f"{room} holds sequences of {longest} tokens, not {length}: lower max_model_len"
    return (
        f"{room} holds no KV cache beside the activations: "
        "lower max_num_batched_tokens or max_num_seqs"
    )
