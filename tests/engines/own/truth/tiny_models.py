"""Tiny random models of many families, saved where the engine can load them.

Weights are drawn wide, so that answers vary and the best token leads the second by far more than
float noise (the tests check that); every family has the trait that makes it worth testing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 320
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SLIDING_BY_TURNS = ["sliding_attention", "full_attention"] * 2
_MOSTLY_SLIDING = ["sliding_attention", "full_attention", *["sliding_attention"] * 2]


@dataclass(frozen=True)
class Family:
    """`config` builds the configuration; `attention` is what `generate` runs with (sinks need
    eager).
    """

    config: Callable[[], Any]
    attention: str = "sdpa"
    num_groups: int = 1


def _config(class_name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, class_name)(**{**_COMMON, **changes})


def _gpt2() -> Any:
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
    return transformers.GPT2Config(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, **sizes)


FAMILIES = {
    "llama": Family(_config("LlamaConfig")),
    "llama_mqa": Family(_config("LlamaConfig", num_key_value_heads=1)),
    "qwen2": Family(_config("Qwen2Config")),
    "qwen3": Family(_config("Qwen3Config", head_dim=16)),
    "mistral": Family(_config("MistralConfig", sliding_window=11)),
    "phi3": Family(_config("Phi3Config", num_key_value_heads=4)),
    "gemma2": Family(
        _config(
            "Gemma2Config",
            head_dim=16,
            sliding_window=9,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=20.0,
        ),
        attention="eager",
        num_groups=2,
    ),
    "gemma3": Family(
        _config("Gemma3TextConfig", head_dim=16, sliding_window=10, layer_types=_MOSTLY_SLIDING),
        num_groups=2,
    ),
    "gpt2": Family(_gpt2),
    "mixtral": Family(_config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": Family(
        _config(
            "Qwen3MoeConfig",
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        )
    ),
    "deepseek_v3": Family(  # keys of size 24, values of size 16
        _config(
            "DeepseekV3Config",
            num_key_value_heads=4,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            kv_lora_rank=16,
            q_lora_rank=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        )
    ),
    "qwen3_5": Family(  # three layers with recurrent states, one that attends
        _config(
            "Qwen3_5TextConfig",
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    ),
    "llama4": Family(  # chunks of 10 tokens; full layers scale queries by position / 5
        _config(
            "Llama4TextConfig",
            head_dim=16,
            intermediate_size_mlp=96,
            num_local_experts=4,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 0, 1, 1],
            attention_chunk_size=10,
            floor_scale=5,
            attn_scale=1.0,
        ),
        num_groups=2,
    ),
    "gpt_oss": Family(
        _config(
            "GptOssConfig",
            head_dim=16,
            sliding_window=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=_SLIDING_BY_TURNS,
        ),
        attention="eager",
        num_groups=2,
    ),
}


def _partial_phi() -> Any:
    """Configure a Phi that rotates half of each head's dimensions."""
    config = FAMILIES["phi3"].config()
    config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    }
    return config


VARIANTS = {"phi3_partial": Family(_partial_phi)}  # for single tests


def save(name: str, folder: Path, seed: int = 0, num_layers: int | None = None) -> Path:
    """Draw the family's weights and save them; the folder. `num_layers`: only the first ones."""
    torch.manual_seed(seed)
    config = (FAMILIES | VARIANTS)[name].config()
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25 if parameter.dim() == 2 else 0.3)
            elif "norm" in parameter_name or "ln_" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, 0.5)
    model.save_pretrained(folder)
    return folder
