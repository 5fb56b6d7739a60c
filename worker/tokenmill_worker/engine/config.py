"""The engine's settings: one frozen value, validated as a whole; all problems are reported at once.

Names are those of vLLM and Transformers where the meaning is the same.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args, get_origin, get_type_hints

from tokenmill_schemas.generation import LogprobsMode
from tokenmill_worker.engine.machine import total_memory
from tokenmill_worker.engine.types import SchedulingPolicy

GIB = 1 << 30
AttentionName = Literal["auto", "reference", "cpu", "triton", "flash", "torch_varlen"]
Quantization = Literal["int8", "int4"]


class EngineConfigError(ValueError):
    """Settings that cannot work; `problems` lists each as one sentence."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings.

    0 or None means "decide at start" where the type allows it. `model` is a directory, a `.gguf`
    file, a hub name, or one of the built-in names "smollm2-135m-instruct" and "gemma3-270m".
    `num_blocks` sets the blocks of every layer group; None sizes the pools from
    `max_memory_percent` of the free memory.
    """

    model: str
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    device: str = "auto"
    quantization: Quantization | None = None
    attention: AttentionName = "auto"
    max_model_len: int | None = None
    # cache
    block_size: int = 16
    num_blocks: int | None = None
    max_memory_percent: float = 0.9
    max_memory_gib: float | None = None  # cap on the KV pool
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"] = "auto"
    prefix_cache: bool = True
    cpu_offload_gib: float = 0.0
    # scheduler
    policy: SchedulingPolicy = SchedulingPolicy.FIFO
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    # read budget: KV tokens read per step (backends that gather)
    max_read_tokens: int | None = None
    # share of blocks below which no new prefill starts; Transformers' documents say 0.2
    safety_margin: float = 0.05
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0  # 0: no limit
    max_long_partial_prefills: int = 0  # 0: no limit
    max_waiting: int = 100_000
    preempt: Literal["least_wasted", "newest", "oldest"] = "least_wasted"
    # how much bulk may lengthen a shared step (0.5: by half); None: no limit
    bulk_slowdown: float | None = 0.5
    max_bypass: int = 16  # sequences that may start before a head that does not fit
    # answers
    logprobs_mode: LogprobsMode = "raw_logprobs"  # of requests that name none
    # adapters
    adapters: str = ""  # name=folder,name=folder
    max_loras: int = 4  # different adapters in one step
    max_cached_loras: int = 16
    # speed
    fuse: bool = True  # CPU in float32, and CUDA: replace layers by equivalent fused ones
    narrow_weights: bool = True  # CPU: store float32 weights in the narrowest lossless form
    amx: bool = True  # CPU: use AMX registers or byte products; off: float32 instructions
    # n-gram drafts per step and sequence; 0: off; excludes async_batching
    speculative_tokens: int = 0
    cuda_graphs: bool | None = None  # None: on with CUDA
    max_cached_graphs: int = 32
    q_padding_interval: int = 64
    kv_padding_interval: int = 16_384
    async_batching: bool | None = None  # None: on with CUDA and without drafts
    num_threads: int | None = None
    tensor_parallel: bool = False  # requires torchrun
    trust_remote_code: bool = False
    # at start: compare the logits of a few steps with the unmodified model's
    verify_model: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", SchedulingPolicy(self.policy))
        problems = self.problems()
        if problems:
            raise EngineConfigError(problems)

    def problems(self) -> list[str]:
        """Return one sentence for each setting that cannot work, with the given value."""
        found: list[str] = []

        def require(ok: bool, sentence: str) -> None:
            if not ok:
                found.append(sentence)

        require(bool(self.model), "model must not be empty")
        for name, choices in _choices().items():
            value = getattr(self, name)
            require(
                value in choices,
                f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}",
            )
        for name in (
            "block_size",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_cached_graphs",
            "q_padding_interval",
            "kv_padding_interval",
            "max_waiting",
            "max_loras",
        ):
            require(
                getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}"
            )
        for name in ("num_blocks", "max_model_len", "max_read_tokens", "num_threads"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, not {value}")
        require(
            self.num_blocks is None or self.num_blocks >= 2,
            f"num_blocks must be at least 2 (block 0 is reserved), not {self.num_blocks}",
        )
        for name in (
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "speculative_tokens",
            "max_bypass",
        ):
            require(
                getattr(self, name) >= 0, f"{name} must not be negative, not {getattr(self, name)}"
            )
        require(
            0.0 < self.max_memory_percent <= 1.0,
            f"max_memory_percent must be in (0, 1], not {self.max_memory_percent}",
        )
        require(
            0.0 <= self.safety_margin < 1.0,
            f"safety_margin must be in [0, 1), not {self.safety_margin}",
        )
        slowdown = self.bulk_slowdown
        require(
            slowdown is None or slowdown >= 0, f"bulk_slowdown must not be negative, not {slowdown}"
        )
        found += self._memory_problems()
        found += self._idle_settings()
        if self.max_num_partial_prefills and self.max_long_partial_prefills:
            require(
                self.max_long_partial_prefills <= self.max_num_partial_prefills,
                f"max_long_partial_prefills ({self.max_long_partial_prefills}) must not exceed "
                f"max_num_partial_prefills ({self.max_num_partial_prefills})",
            )
        require(
            self.max_cached_loras >= self.max_loras,
            f"max_cached_loras ({self.max_cached_loras}) must be at least "
            f"max_loras ({self.max_loras})",
        )
        require(
            not (self.speculative_tokens and self.async_batching),
            "speculative_tokens cannot be used with async_batching: "
            "drafts follow a token that must be known",
        )
        for name in ("adapters", "cuda_graphs", "async_batching"):
            require(
                not (getattr(self, name) and self.tensor_parallel),
                f"{name} cannot be used with tensor_parallel",
            )
        try:
            _ = self.adapter_folders
        except ValueError as error:
            found.append(f"adapters {error}")
        return found

    def _memory_problems(self) -> list[str]:
        found = []
        cap, offload = self.max_memory_gib, self.cpu_offload_gib
        if cap is not None and not 0 < cap < math.inf:
            found.append(f"max_memory_gib must be positive, not {cap}")
        if cap is not None and self.num_blocks is not None:
            found.append(
                f"max_memory_gib ({cap:g}) does nothing beside num_blocks ({self.num_blocks}): "
                "set one of them"
            )
        if not 0 <= offload < math.inf:
            found.append(f"cpu_offload_gib must not be negative, not {offload}")
        elif offload and (total := total_memory()) is not None and offload * GIB > total:
            found.append(
                f"cpu_offload_gib ({offload:g}) is more than the machine's memory of "
                f"{total / GIB:.1f} GiB"
            )
        return found

    def _idle_settings(self) -> list[str]:
        """Return one sentence for each setting that has no effect beside the others."""
        found = []
        threshold, longest = self.long_prefill_token_threshold, self.max_model_len
        if self.max_long_partial_prefills and not threshold and self.max_num_partial_prefills < 2:
            found.append(
                f"max_long_partial_prefills ({self.max_long_partial_prefills}) does nothing "
                "without long_prefill_token_threshold: no prompt counts as long"
            )
        if longest is not None and threshold > longest:
            found.append(threshold_problem(threshold, longest))
        return found

    @property
    def adapter_folders(self) -> dict[str, str]:
        """The folder of each adapter, by adapter name.

        Raises:
            ValueError: `adapters` is malformed.
        """
        return read_table(self.adapters, "name=folder")

    def replace(self, **changes: object) -> EngineConfig:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def threshold_problem(threshold: int, max_model_len: int) -> str:
    return (
        f"long_prefill_token_threshold ({threshold}) exceeds the model's length of "
        f"{max_model_len}: nothing is long"
    )


@lru_cache
def _choices() -> dict[str, tuple[object, ...]]:
    """Return the allowed values of each setting that takes one of a few values."""
    found: dict[str, tuple[object, ...]] = {}
    for name, hint in get_type_hints(EngineConfig).items():
        kinds = (
            [hint]
            if get_origin(hint) is Literal
            else [kind for kind in get_args(hint) if kind is not type(None)]
        )
        if kinds and all(get_origin(kind) is Literal for kind in kinds):
            missing: tuple[object, ...] = (None,) if type(None) in get_args(hint) else ()
            found[name] = (*(value for kind in kinds for value in get_args(kind)), *missing)
    return found


def read_table(text: str, form: str) -> dict[str, str]:
    """Parse `a=b,c=d` into a dictionary; white space around the parts is ignored.

    Raises:
        ValueError: an entry is malformed or repeated.
    """
    table: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        if not name or not value:
            raise ValueError(f"must be {form},{form}, not {entry!r}")
        if name in table:
            raise ValueError(f"names {name!r} twice")
        table[name] = value
    return table


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same KV shape that share block ids.

    `window` is in tokens; None: full attention.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The resolved shape of the KV cache, as the bookkeeping needs it.

    `num_blocks[g]` counts the blocks of group g, the reserved block 0 included.
    `num_host_blocks[g]` counts those of the host pool (0: no offload).
    """

    block_size: int
    groups: tuple[LayerGroup, ...]
    num_blocks: tuple[int, ...]
    num_host_blocks: tuple[int, ...]
    prefix_cache: bool = True
