"""What each engine setting is for, in one line: the help texts of the flags. The values live in EngineConfig."""

from __future__ import annotations

from typing import Final

ENGINE_HELP: Final[dict[str, str]] = {
    "model": "directory, .gguf file, hub name, or a built-in: smollm2-135m-instruct, gemma3-270m",
    "dtype": "float32, bfloat16, float16 or auto",
    "device": "cpu, cuda, cuda:1, … or auto",
    "quantization": "int8 or int4 weights",
    "attention": "auto, reference, cpu, triton, flash or torch_varlen",
    "max_model_len": "longest prompt and answer together (default: the model's)",
    "block_size": "tokens in a block of the KV cache",
    "num_blocks": "blocks in the KV cache (default: what fits)",
    "max_memory_percent": "share of the free memory that the engine may take",
    "max_memory_gib": "cap on the KV cache, whatever is free",
    "kv_dtype": "type of keys and values: auto, float32, bfloat16 or float16",
    "fuse": "swap well-known layers for fused ones",
    "prefix_cache": "keep the blocks of prompts for those that begin alike",
    "cpu_offload_gib": "host memory for preempted sequences and evicted prefixes",
    "policy": "fifo, prefill_first or priority",
    "max_num_batched_tokens": "tokens in one step, prefill and decode together",
    "max_num_seqs": "sequences that run at once",
    "max_read_tokens": "keys and values read in one step",
    "safety_margin": "share of free blocks below which no prompt is started",
    "long_prefill_token_threshold": "a prompt above this counts as long; 0: off",
    "max_num_partial_prefills": "prompts in progress at once; 0: no limit",
    "max_long_partial_prefills": "of them, long ones; 0: no limit",
    "max_waiting": "requests that may wait inside the engine",
    "preempt": "least_wasted, newest or oldest",
    "max_bypass": "requests that may pass one that does not fit",
    "speculative_tokens": "draft tokens a step, looked up in the prompt; 0: off",
    "cuda_graphs": "(default: on where CUDA is)",
    "max_cached_graphs": "CUDA graphs kept",
    "q_padding_interval": "query tokens of mixed steps are padded to multiples of this",
    "kv_padding_interval": "and their keys to multiples of this",
    "async_batching": "plan the next step while this one runs (default: where the device allows)",
    "num_threads": "threads of the engine on a CPU (default: all cores)",
    "tensor_parallel": "split the model over the ranks of torchrun",
    "trust_remote_code": "run code that comes with the model",
}
