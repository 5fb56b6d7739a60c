"""Transformers' ContinuousBatchingConfig, with each argument that its release 5.23 has.

An argument is taken with its meaning, or refused by its name where nothing here has that meaning.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.config.engine_config import GIB
from tokenmill_worker.engines.own.config.machine import total_memory
from tokenmill_worker.engines.own.types import SchedulingPolicy

_LEAST_SEQS = 64  # of a step, where no setting limits it
_COMPILED = "nothing is compiled by torch: the engine has fused layers of its own"
_ONE_DEVICE = "the engine runs on one device"
_REFUSED = {
    "max_blocks_per_request": "block tables grow with their requests",
    "varlen_compile_config": _COMPILED,
    "decode_compile_config": _COMPILED,
    "default_compile_level": _COMPILED,
    "use_default_compile_configs": _COMPILED,
    "disable_nccl_graph_mixing": _ONE_DEVICE,
    "cpu_group_timeout": _ONE_DEVICE,
}
_LEAST = {"page_size": 1, "block_size": 1, "max_requests_per_batch": 1, "max_queue_size": 0}


@dataclass(frozen=True, kw_only=True)
class ContinuousBatchingConfig:
    """Cache, scheduling and graphs. None, and 0 of an interval: the engine's default.

    Each request has parameters of its own in any case, and one that the engine does not have is
    refused, never dropped, whatever `per_request_processors` and `drop_unsupported_processors` say.
    Attention is chosen by `EngineConfig.attention`: "auto" comes to flash-attn only where Triton
    cannot serve, so `auto_switch_to_flash` changes nothing.

    Raises ValueError, with a sentence for each, for arguments that have no meaning here, unless
    they have Transformers' default.
    """

    page_size: int | None = None  # tokens
    block_size: int | None = None  # the earlier name of page_size
    num_blocks: int | None = None  # that requests can use
    max_batch_tokens: int | None = None  # per step
    max_requests_per_batch: int | None = None
    max_memory_percent: float | None = None  # share of the free memory, 0 to 1
    scheduler_type: str = "fifo"  # or "prefill_first"
    safety_margin: float | None = None
    max_queue_size: int = 0  # requests that the engine has not taken yet; 0: no limit
    seed: int | None = None  # of requests that name none; each gets one of its own from it
    allow_block_sharing: bool = True
    return_logprobs: bool = False
    use_cuda_graph: bool | tuple[bool, bool] | None = None  # both values of a pair must be equal
    use_async_batching: bool | None = None
    q_padding_interval_size: int | None = None
    kv_padding_interval_size: int | None = None
    max_cached_graphs: int | None = None
    cpu_offload_space: float | None = 0.0  # GiB; None: as much as the cache has and memory allows
    cpu_offload_space_safety_threshold: float = 0.8  # most of the machine's memory, as a share
    auto_switch_to_flash: bool = True
    per_request_processors: bool = False
    drop_unsupported_processors: bool = True
    # refused, but for these values
    max_blocks_per_request: int | None = None
    varlen_compile_config: Any = None
    decode_compile_config: Any = None
    default_compile_level: int = 0
    use_default_compile_configs: bool | None = None
    disable_nccl_graph_mixing: bool = True
    cpu_group_timeout: float | None = 300.0

    def __post_init__(self) -> None:
        problems = [
            f"{field.name}={value!r} has no meaning here: {_REFUSED[field.name]}"
            for field in dataclasses.fields(self)
            if field.name in _REFUSED and (value := getattr(self, field.name)) != field.default
            if not (field.default is None and value is False)  # that asks for nothing either
        ]
        problems += [
            f"{name} must be at least {least}, not {value}"
            for name, least in _LEAST.items()
            if (value := getattr(self, name)) is not None and value < least
        ]
        pair = self.use_cuda_graph
        if isinstance(pair, tuple) and len(set(pair)) > 1:
            problems.append(
                f"use_cuda_graph={pair!r} is not possible: "
                "steps with and without prompts have graphs, or neither has"
            )
        if None not in (self.page_size, self.block_size) and self.page_size != self.block_size:
            problems.append(
                f"page_size={self.page_size} and block_size={self.block_size} name one thing"
            )
        if not 0 <= self.cpu_offload_space_safety_threshold <= 1:
            share = self.cpu_offload_space_safety_threshold
            problems.append(f"cpu_offload_space_safety_threshold must be in [0, 1], not {share}")
        if problems:
            raise ValueError("; ".join(problems))

    @classmethod
    def of(cls, given: Any) -> ContinuousBatchingConfig:
        """Return `given`; of Transformers' own class, what is not its default.

        Raises ValueError for another type, and for arguments of later versions that are set.
        """
        if isinstance(given, cls):
            return given
        kind = type(given)
        if kind.__name__ != cls.__name__ or not dataclasses.is_dataclass(given):
            raise ValueError(
                f"continuous_batching_config must be a {cls.__name__}, "
                f"not {kind.__module__}.{kind.__qualname__}"
            )
        values = {
            field.name: value
            for field in dataclasses.fields(given)
            if (value := getattr(given, field.name)) != field.default
        }
        if unknown := values.keys() - {field.name for field in dataclasses.fields(cls)}:
            raise ValueError(f"not supported: {', '.join(sorted(unknown))}")
        return cls(**values)

    def applied_to(self, config: EngineConfig, workload_hints: Any = None) -> EngineConfig:
        """Return the engine's configuration with these values.

        `workload_hints.num_requests` lowers the most sequences of a step where nothing sets them.
        """
        graphs = self.use_cuda_graph
        values = {
            "block_size": self.page_size or self.block_size,
            "num_blocks": self.num_blocks,
            "max_num_batched_tokens": self.max_batch_tokens,
            "max_num_seqs": self.max_requests_per_batch or _hinted_seqs(config, workload_hints),
            "max_memory_percent": self.max_memory_percent,
            "policy": SchedulingPolicy(self.scheduler_type),
            "safety_margin": self.safety_margin,
            "prefix_cache": self.allow_block_sharing,
            "cuda_graphs": graphs[0] if isinstance(graphs, tuple) else graphs,
            "async_batching": self.use_async_batching,
            "q_padding_interval": self.q_padding_interval_size or None,
            "kv_padding_interval": self.kv_padding_interval_size or None,
            "max_cached_graphs": self.max_cached_graphs,
            "cpu_offload_gib": self._offload_gib(),
        }
        return config.replace(**{name: v for name, v in values.items() if v is not None})

    def _offload_gib(self) -> float | Literal["auto"]:
        share, total = self.cpu_offload_space_safety_threshold, total_memory()
        most = math.inf if total is None else share * total / GIB
        if self.cpu_offload_space is None:  # "auto" keeps to 0.8 of what is free
            return "auto" if share >= 0.8 or total is None else most
        return min(self.cpu_offload_space, most)


def _hinted_seqs(config: EngineConfig, workload_hints: Any) -> int | None:
    num_requests = getattr(workload_hints, "num_requests", 0)
    limit = config.max_num_seqs or _LEAST_SEQS
    return num_requests if 0 < num_requests < limit else None
