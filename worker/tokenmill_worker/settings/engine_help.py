"""The help text of each engine setting's flag, in one line. The values are in EngineConfig."""

from __future__ import annotations

from typing import Final

ENGINE_HELP: Final[dict[str, str]] = {
    "model": "directory, .gguf file, hub name, or a built-in: smollm2-135m-instruct, gemma3-270m",
    "dtype": "float32, bfloat16, float16 or auto",
    "device": "cpu, cuda, cuda:1, … or auto",
    "quantization": "int8 or int4 weights",
    "attention": "auto, reference, cpu, triton, flash or torch_varlen",
    "max_model_len": "longest prompt and answer together, in tokens (default: the model's limit)",
    "block_size": "tokens in a block of the KV cache",
    "num_blocks": "blocks in the KV cache (default: what fits)",
    "max_memory_percent": "share of the free memory that the engine may use",
    "max_memory_gib": "largest size of the KV cache, also if more memory is free",
    "kv_dtype": (
        "type of keys and values, also float8_e4m3fn; auto: as the weights, float16 beside int8 "
        "and int4"
    ),
    "fuse": "replace well-known layers by fused ones",
    "narrow_weights": (
        "keep weights in memory in the precision of their file, with float32 results (CPU)"
    ),
    "amx": "use Intel's AMX, or byte dot products (CPU); without, sums are chains of float32",
    "prefix_cache": (
        "compute a common beginning of prompts once; without it each of `n` choices computes the "
        "prompt"
    ),
    "cpu_offload_gib": "host memory for preempted sequences and evicted prefixes",
    "policy": "fifo, prefill_first or priority",
    "max_num_batched_tokens": (
        "most tokens in one step, prefill and decode together; for a GPU: 2048"
    ),
    "max_num_seqs": "most sequences that run at once; for a GPU: 256",
    "max_read_tokens": "most cached tokens that attention reads in one step",
    "safety_margin": "no prompt is started when the share of free blocks is below this",
    "long_prefill_token_threshold": "a prompt of more tokens counts as long; 0: off",
    "max_num_partial_prefills": "prompts that are computed at once; 0: no limit",
    "max_long_partial_prefills": "long prompts that are computed at once; 0: no limit",
    "max_waiting": "requests that may wait inside the engine",
    "preempt": "which sequence is preempted: least_wasted, newest or oldest",
    "bulk_slowdown": (
        "policy priority: how much bulk jobs may slow a step of others (0.5: by half); none: no "
        "limit"
    ),
    "max_bypass": "how many requests may pass one that does not fit yet",
    "logprobs_mode": (
        "log-probabilities of requests that name no mode: raw_logprobs, of the model's "
        "distribution, or processed_logprobs, of the one that tokens are drawn from"
    ),
    "adapters": "LoRA adapters that jobs may name, as name=folder,name=folder",
    "max_loras": "most different adapters in one step",
    "max_cached_loras": "most adapters kept in memory; the least recently used is dropped",
    "speculative_tokens": (
        "draft tokens per step, from the prompt; 0: off. Steps are then not planned ahead"
    ),
    "cuda_graphs": "replay steps as CUDA graphs (default: on where CUDA is)",
    "max_cached_graphs": "most CUDA graphs in memory",
    "q_padding_interval": "query tokens of mixed steps are padded to multiples of this",
    "kv_padding_interval": "keys of mixed steps are padded to multiples of this",
    "async_batching": (
        "plan the next step while this one runs (default: on CUDA, without speculative tokens)"
    ),
    "num_threads": "threads of the engine on a CPU (default: all cores)",
    "tensor_parallel": "split the model over the ranks of torchrun",
    "trust_remote_code": "run code that comes with the model",
    "verify_model": (
        "compare the engine's logits with the model's own at the start; end on a difference"
    ),
}
