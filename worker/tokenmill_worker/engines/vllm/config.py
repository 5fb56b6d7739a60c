"""The settings of a worker's vLLM and its abilities, read without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tokenmill_schemas.generation import LOGPROBS_MODES
from tokenmill_worker.contract.capabilities import STRUCTURED, Capabilities
from tokenmill_worker.contract.engine_kind import EngineKind
from tokenmill_worker.contract.setting_fields import setting
from tokenmill_worker.engines.own.config import EngineConfig

TESTED: Final = ("0.32.",)  # versions of vLLM begin so
PACKAGE: Final = "'vllm>=0.32,<0.33'"
MAX_LOGPROBS: Final = 100  # at a position, as the queue allows
MAX_BIASES, MAX_STOP_IDS = 1_024, 128  # of a request; beyond them vLLM's engine core dies (GPUs)
# settings of our engine that are vLLM's arguments of the same name
SAME: Final = (
    "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "trust_remote_code",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(EngineConfig):
    """Settings of our engine that vLLM has too, named by KIND. 0 and None: as vLLM chooses."""

    kind: ClassVar[str] = "vllm"

    engine_arg: str = setting(
        "", "another argument of vLLM, NAME=VALUE; several, or in one variable, with spaces between"
    )


def capabilities_of(
    *, has_grammars: bool, has_adapters: bool, has_position_seeds: bool, has_drafts: bool = False
) -> Capabilities:
    """Return the abilities of one loaded vLLM. Seeds go on exactly where its noise is keyed by
    position: its model runner V2.
    """
    return Capabilities(
        structured=STRUCTURED if has_grammars else (), tool_grammars=has_grammars,
        thinking_budget=has_grammars, scores=True, prompt_logprobs=True, adapters=has_adapters,
        exact_resume=has_position_seeds, limits={"temperature": (0.0, 2.0)},
        unavailable=(
            "bad_words_ids", "sequence_bias", "no_repeat_ngram_size", "begin_suppress_tokens",
            "forced_bos_token_id", "forced_eos_token_id",
            *(("min_p", "logit_bias", "suppress_tokens") if has_drafts else ()),
        ),
    )  # fmt: skip


_NO_DRAFTS: Final = "refused beside speculative-config"
_BIASES: Final = f"together with {{}} at most {MAX_BIASES:,} tokens; {_NO_DRAFTS}"
_UNCACHED: Final = "the prompt is computed without the prefix cache"
_PENALTIES: Final = (
    f"counts {MAX_BIASES:,} different tokens before a take-over; none there beside "
    "speculative-config"
)
NOTES: Final = {
    "temperature": "refused beyond; below 0.01, but for 0, as 0.01",
    "seed": "goes on exactly with model runner V2 (GPUs); else (CPU) another draw after a "
    "take-over, or after its place was taken",
    "stop_token_ids": f"beside min_tokens at most {MAX_STOP_IDS}, with the model's own",
    "presence_penalty": f"{_PENALTIES}; begins again behind each token that occurs on both sides",
    "frequency_penalty": _PENALTIES,
    "repetition_penalty": "the two other penalties then count from before a take-over exactly for "
    "each token whose logit stays above 0",
    "logit_bias": _BIASES.format("suppress_tokens"),
    "suppress_tokens": _BIASES.format("logit_bias"),
    "speculate": "does nothing: drafts are vLLM's, by speculative-config",
    "min_p": _NO_DRAFTS,
    "logprobs_mode": f"refused but for {LOGPROBS_MODES[0]}",
    **dict.fromkeys(("prompt_logprobs", "continuations"), _UNCACHED),
    "echo": f"with log-probabilities {_UNCACHED}",
    "priority": "interactive: takes the place of the youngest choice of a lower class",
    "tenant": "separates prefix caches; tenants take turns in the queue alone",
    "deadline_ms": "checked ten times a second",
}
# arguments of vLLM that do what settings of our engine do
INSTEAD: Final = {
    "quantization": "quantization", "attention": "attention-backend", "kv_dtype": "kv-cache-dtype",
    "max_memory_percent": "gpu-memory-utilization", "max_memory_gib": "kv-cache-memory-bytes",
    "cpu_offload_gib": "kv-offloading-size", "cache_disk": "kv-transfer-config",
    "cache_disk_gib": "kv-transfer-config", "enable_chunked_prefill": "enable-chunked-prefill",
    "long_prefill_token_threshold": "long-prefill-token-threshold", "cuda_graphs": "enforce-eager",
    "speculative_tokens": "speculative-config", "draft_model": "speculative-config",
}  # fmt: skip

KIND: Final = EngineKind(
    config=VllmConfig,
    settings=("model", *SAME, "prefix_cache", "adapters", "max_loras", "engine_arg"),
    capabilities=capabilities_of(has_grammars=True, has_adapters=True, has_position_seeds=True),
    notes=NOTES,
    instead={name: f"--engine-arg {argument}=…" for name, argument in INSTEAD.items()},
    packages={"vllm": PACKAGE, "jsonschema_rs": "jsonschema-rs"},
)
