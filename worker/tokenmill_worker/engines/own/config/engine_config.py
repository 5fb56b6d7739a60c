"""The engine's settings: one frozen value, validated as a whole; all problems are reported at once.

Names are those of vLLM and Transformers where the meaning is the same.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tokenmill_worker.contract.engine_kind import EngineConfigError
from tokenmill_worker.contract.name_table import read_table
from tokenmill_worker.contract.setting_fields import (
    SPLIT_BY_VLLM,
    direct_value,
    field_problems,
    setting,
)
from tokenmill_worker.engines.own.config.machine import total_memory
from tokenmill_worker.engines.own.config.prefill_limits import PrefillLimits
from tokenmill_worker.engines.own.types import SchedulingPolicy

GIB = 1 << 30
AttentionName = Literal["auto", "reference", "cpu", "triton", "flash"]
Quantization = Literal["int8", "int4", "fp8"]
KVDtype = Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings.

    0 or None means "decide at start" where the type allows it. `model` is a directory, a `.gguf`
    file, a hub name, or one of the built-in names "smollm2-135m-instruct" and "gemma3-270m".
    Without `num_blocks` the pool is sized from `max_memory_percent` of the free memory.

    A field that `setting` declares is a flag and a variable of a worker. One of `direct_value` is
    not: only code that builds this object sets it.
    """

    kind: ClassVar[str] = "own"

    model: str = field(
        metadata={
            "help": "the model: a folder, a .gguf file, a hub name, or a built-in: "
            "smollm2-135m-instruct, gemma3-270m",
            "minimum": None,
        }
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = setting(
        "auto", "float32, bfloat16, float16 or auto"
    )
    device: str = setting("auto", "cpu, cuda, cuda:1, … or auto")
    quantization: Quantization | None = setting(None, "int8 or int4 (CPU), fp8 (GPU) weights")
    attention: AttentionName = setting("auto", "auto, reference, cpu, triton or flash")
    max_model_len: int | None = setting(
        None,
        "longest prompt and answer together, in tokens (default: the model's limit)",
        minimum=1,
    )
    # cache
    block_size: int = direct_value(0, minimum=0)  # in tokens; 0: 16, or 256 with flash-attn 2
    num_blocks: int | None = direct_value(None, minimum=1)  # that sequences can use
    max_memory_percent: float = setting(0.9, "share of the free memory that the engine may use")
    max_memory_gib: float | None = setting(
        None, "largest size of the KV cache, also if more memory is free"
    )
    kv_dtype: KVDtype = setting(
        "auto", "type of keys and values; auto: as the weights, float16 beside int8 and int4"
    )
    calculate_kv_scales: bool = setting(
        False, "calculate scales of 8-bit keys and values at the start (default: the model's)"
    )
    prefix_cache: bool = setting(
        True,
        "compute a common beginning of prompts once; "
        "without it each of `n` choices computes the prompt",
    )
    cpu_offload_gib: float | Literal["auto"] = setting(
        0.0,
        "host memory for preempted sequences and evicted prefixes; auto: as much as the cache, "
        "at most 0.8 of what is free",
    )
    cache_disk: str | None = setting(
        None,
        "folder of blocks below the host memory, which outlive the worker; workers may share it",
    )
    cache_disk_gib: float = setting(16.0, "most that workers keep in that folder")
    # scheduler
    policy: SchedulingPolicy = setting(SchedulingPolicy.FIFO, "fifo, prefill_first or priority")
    max_num_batched_tokens: int = setting(
        0,
        "most tokens in one step; 0: 512 (CPU) or 2048 (GPU), fewer if memory is short",
        minimum=0,
    )
    max_num_seqs: int = setting(
        0, "most sequences at once; 0: 64 (CPU) or 256 (GPU), fewer if memory is short", minimum=0
    )
    # most cached tokens that attention reads in one step; only backends that gather them have it
    max_read_tokens: int | None = direct_value(None, minimum=1)
    # no prompt is started when the share of free blocks is below; Transformers' documents say 0.2
    safety_margin: float = direct_value(0.05)
    enable_chunked_prefill: bool = setting(
        True, "compute a prompt in parts where a step lacks room for all of it; else it waits"
    )
    long_prefill_token_threshold: int = setting(
        0,
        "a prompt of more tokens counts as long, and a step computes no more of it; 0: off",
        minimum=0,
    )
    max_num_partial_prefills: int | None = setting(
        None,
        "prompts that are computed in parts at once, one of them long; 0: no limit "
        "(default: no limit)",
        minimum=0,
    )
    # long prompts in parts at once; 0: no limit; None: 1 beside the limit above, else no limit
    max_long_partial_prefills: int | None = direct_value(None, minimum=0)
    # which sequence is preempted
    preempt: Literal["least_wasted", "newest", "oldest"] = direct_value("least_wasted")
    bulk_slowdown: float | None = setting(
        0.5,
        "with policy priority: how much bulk jobs may slow a step of others (0.5: by half); "
        "none: no limit",
        minimum=0,
    )
    max_bypass: int = direct_value(16, minimum=0)  # may pass a request that does not fit yet
    # parameters of requests that name none
    generation_config: str | None = setting(
        "model",
        "sampling defaults of requests that name none: those of the model's "
        "generation_config.json, none, or those of another such file or its folder",
    )
    # adapters
    adapters: str = setting("", "LoRA adapters that jobs may name, as name=folder,name=folder")
    max_loras: int = setting(4, "most different adapters in one step", minimum=1)
    # adapters in memory, max_loras of them at least; the least recently used is dropped
    max_cached_loras: int = direct_value(16)
    # speed
    fuse: bool = direct_value(True)  # replace well-known layers by fused ones
    # keep weights in memory in the precision of their file, with float32 results (CPU)
    narrow_weights: bool = direct_value(True)
    # use AMX, or byte dot products (CPU); without, sums are chains of float32
    amx: bool = direct_value(True)
    speculative_tokens: int = setting(
        0,
        "most draft tokens of a sequence in a step, from its own text; 0: off",
        minimum=0,
    )
    draft_model: str | None = setting(
        None,
        "a smaller model with the same tokenizer, named as the model is: it drafts up to "
        "speculative-tokens per step, beside the prompt, while that pays",
    )
    cuda_graphs: bool | None = setting(
        None, "replay steps as CUDA graphs (default: on where CUDA is)"
    )
    max_cached_graphs: int = direct_value(256, minimum=1)
    # query tokens of mixed steps are padded to multiples of this
    q_padding_interval: int = direct_value(64, minimum=1)
    # contexts are padded to this, times a power of two
    kv_padding_interval: int = direct_value(2048, minimum=1)
    # plan the next step while this one runs; None: on CUDA
    async_batching: bool | None = direct_value(None)
    num_threads: int | None = setting(
        None,
        "threads of the engine on a CPU (default: all cores that the process and its container may "
        "use)",
        minimum=1,
    )
    tensor_parallel: object = direct_value(None)  # refused
    trust_remote_code: bool = setting(False, "run code that comes with the model")
    verify_model: bool = setting(
        True, "compare the engine's logits with the model's own at the start; end on a difference"
    )

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
        found += field_problems(self)
        require(
            0.0 < self.max_memory_percent <= 1.0,
            f"max_memory_percent must be in (0, 1], not {self.max_memory_percent}",
        )
        require(
            0.0 <= self.safety_margin < 1.0,
            f"safety_margin must be in [0, 1), not {self.safety_margin}",
        )
        found += self._memory_problems()
        found += self._idle_settings()
        found += self.prefill_limits.problems()
        if self.max_model_len is not None:
            found += self.prefill_limits.length_problems(
                self.max_model_len, self.max_num_batched_tokens or self.max_model_len
            )
        require(
            self.enable_chunked_prefill
            or self.policy is not SchedulingPolicy.PRIORITY
            or self.bulk_slowdown is None,
            f"bulk_slowdown ({self.bulk_slowdown}) needs enable_chunked_prefill, because it cuts "
            "bulk prompts: set it to none",
        )
        require(
            not (self.draft_model and self.async_batching),
            "draft_model cannot be used with async_batching: it drafts between two steps",
        )
        require(
            not (self.draft_model and self.max_read_tokens),
            "draft_model cannot be used with max_read_tokens, which does not limit its passes",
        )
        require(not self.tensor_parallel, f"tensor_parallel {SPLIT_BY_VLLM}")
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
            words = f"does nothing beside num_blocks ({self.num_blocks}): set one of them"
            found.append(f"max_memory_gib ({cap:g}) {words}")
        disk = self.cache_disk_gib
        if not 0 < disk < math.inf:
            found.append(f"cache_disk_gib must be positive, not {disk}")
        if offload == "auto":  # never more than there is
            return found
        if not 0 <= offload < math.inf:
            found.append(f"cpu_offload_gib must not be negative, not {offload}")
        elif offload and (total := total_memory()) is not None and offload * GIB > total:
            words = f"is more than the machine's memory of {total / GIB:.1f} GiB"
            found.append(f"cpu_offload_gib ({offload:g}) {words}")
        return found

    def _idle_settings(self) -> list[str]:
        """Return one sentence for each setting that has no effect beside the others."""
        found, long, limits = [], self.max_long_partial_prefills, self.prefill_limits
        if long and not limits.threshold and limits.partial <= 1:
            sentence = f"max_long_partial_prefills ({long}) does nothing without "
            found.append(sentence + "long_prefill_token_threshold: no prompt counts as long")
        if self.calculate_kv_scales and not self.has_narrow_kv:
            found.append(f"calculate_kv_scales needs 8 bits, not kv_dtype {self.kv_dtype}")
        if self.cache_disk and not self.prefix_cache:
            found.append("cache_disk does nothing without prefix_cache")
        if self.draft_model and not self.speculative_tokens:
            found.append("draft_model does nothing without speculative_tokens: set it to 4")
        return found

    @property
    def has_narrow_kv(self) -> bool:
        return self.kv_dtype in ("float8_e4m3fn", "float8_e5m2")

    @property
    def prefill_limits(self) -> PrefillLimits:
        return PrefillLimits.of(
            self.enable_chunked_prefill,
            self.long_prefill_token_threshold,
            self.max_num_partial_prefills,
            self.max_long_partial_prefills,
        )

    @property
    def adapter_folders(self) -> dict[str, str]:
        """The folder of each adapter, by adapter name.

        Raises:
            ValueError: `adapters` is malformed.
        """
        return read_table(self.adapters, "name=folder")

    def with_step_sizes(self, *, on_gpu: bool) -> EngineConfig:
        """Return the settings with the two limits of a step set, where they are 0.

        A GPU's step waits for its weights, so more sequences cost it little.
        """
        tokens, seqs = (2048, 256) if on_gpu else (512, 64)
        tokens = self.max_num_batched_tokens or max(tokens, self.max_num_seqs)
        return self.replace(
            max_num_batched_tokens=tokens, max_num_seqs=self.max_num_seqs or min(seqs, tokens)
        )

    def replace(self, **changes: object) -> EngineConfig:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
