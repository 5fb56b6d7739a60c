"""Small configurations and random weights for any causal family that Transformers can build.

Fields are set by name wherever a configuration or a sub-configuration has them. `OVERRIDES` has
what a family needs beyond that. `SETTINGS` has the attention settings that are tried besides a
family's defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 256
MAX_LENGTH = 128
LAYERS = 4

_NUMBERS = (
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (MAX_LENGTH, "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx"),
    (
        64,
        "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim "
        "backbone_hidden_size",
    ),
    (
        96,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner n_inner "
        "ffn_hidden_size dff d_ff dim_ff",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "expert_ffn_hidden_size linear_key_head_dim linear_value_head_dim linear_head_dim "
        "ngram_vocab_size_base",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
        "num_decoder_layers num_encoder_layers",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "linear_num_value_heads linear_num_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts moe_num_primary_experts depth indexer_n_heads index_n_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_k "
        "num_experts_per_token linear_num_key_heads indexer_compress_ratio "
        "num_dense_layers",
    ),
    (
        1,
        "n_shared_experts num_shared_experts first_k_dense_replace n_group topk_group "
        "moe_num_shared_experts zero_expert_num indexer_kv_heads",
    ),
    (
        16,
        "head_dim qk_nope_head_dim kv_lora_rank global_head_dim "
        "hidden_size_per_layer_input state_size mamba_d_state ssm_state_size mamba_d_head "
        "mamba_head_dim indexer_head_dim index_head_dim",
    ),
    (24, "q_lora_rank v_head_dim"),
    (
        8,
        "qk_rope_head_dim sliding_window attention_chunk_size local_attention window_size "
        "chunk_size keep_window_size indexer_budget index_topk num_patches hc_lowrank "
        "mamba_chunk_size mamba_n_heads mamba_num_heads",
    ),
)
_SIZES = {name: number for number, names in _NUMBERS for name in names.split()} | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# keys come from a latent vector, one for each head
_LATENT: dict[str, Any] = {"num_key_value_heads": 4}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_BY_TURNS = ["linear_attention", "full_attention"] * 2
_SHARED: dict[str, Any] = {
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_NOTE: dict[str, Any] = {
    "per_layer_config": {},
    "head_dim": 24,
    "adapter_in_dim": 64,
    "adapter_input_size": 64,
    **_LATENT,
}
_NO_LAYER_INPUTS: dict[str, Any] = {
    "text_config": {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_hidden_layers": LAYERS,
        "num_kv_shared_layers": LAYERS,
    }
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _SECTIONS)
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note": _NOTE,
    "dots3_note_text": _NOTE,
    "fuyu": {
        "text_config": {
            "model_type": "persimmon",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_LENGTH,
        },
        "image_token_id": 3,
    },
    "gemma4_assistant": _NO_LAYER_INPUTS,
    "gemma4_unified_assistant": _NO_LAYER_INPUTS,
    "bamba": {"attn_layer_indices": [1, 3]},
    "bailing_hybrid": {"layer_types": _BY_TURNS, **_LATENT},
    "codegen": {"rotary_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "longcat_flash": {**_LATENT, "head_dim": 8},
    "gemma3n_text": _SHARED,
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _BY_TURNS, **_LATENT},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 48)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 12},
    "zamba2": {"num_hidden_layers": 54},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "hy_v4",
            "minicpm3",
            "youtu",
        ),
        _LATENT,
    ),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 8, "use_sliding_window": True},
    "decoder": {"is_decoder": True},
    "bidirectional": {"use_bidirectional_attention": True},
    "smaller values": {"v_head_dim": 16},
    "multi-query": {"num_key_value_heads": 1},
    "ALiBi": {"alibi": True},
    "ALiBi, multi-query": {"alibi": True, "multi_query": True},
    "new decoder": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "temperature tuning": {"floor_scale": 4, "attn_scale": 1.0},
    "full layers only": {"layer_types": ["full_attention"] * LAYERS},
}


def families() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def settings_of(family: str) -> list[str]:
    """Return the settings that change this family; "" stands for its defaults.

    A setting counts if the configuration has its fields and differs from it.
    """
    try:
        text = configuration(family).get_text_config()
    except Exception:  # the trial reports it
        return [""]
    found = [""]
    for name, changes in SETTINGS.items():
        has = all(hasattr(text, field) for field in changes if field != "use_sliding_window")
        if has and any(getattr(text, field, None) != value for field, value in changes.items()):
            found.append(name)
    return found


def configuration(family: str, setting: str = "") -> Any:
    changes = OVERRIDES.get(family, {}) | SETTINGS.get(setting, {})
    return CONFIG_MAPPING[family](**_fields(CONFIG_MAPPING[family], changes))


def _fields(kind: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return constructor arguments: small sizes of the fields, sub-configurations, `changes`."""
    taken = set(inspect.signature(kind.__init__).parameters) | set(
        getattr(kind, "__dataclass_fields__", {})
    )
    taken |= {name for name in dir(kind) if not name.startswith("_")} | set(
        getattr(kind, "attribute_map", {})
    )
    defaults = {name: getattr(kind, name, 0) for name in taken}
    fields = {
        name: size
        for name, size in _SIZES.items()
        if name in taken and _is_number(defaults.get(name))
    }
    fields |= {name: value for name, value in changes.items() if name in taken}
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if getattr(part, "model_type", ""):
            fields[name] = part(**_fields(part, changes) | changes.get(name, {}))
    return fields


def _is_number(default: Any) -> bool:
    return default is None or (isinstance(default, int | float) and not isinstance(default, bool))


def build(family: str, setting: str = "", attention: str | None = None) -> Any:
    """Build the model in float32 with a wide spread of weights.

    `attention` is Transformers' name; None: eager. Falcon's eager code adds ALiBi's bias twice.

    Answers then vary, and the best token leads by more than float noise.
    """
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        configuration(family, setting),
        dtype=torch.float32,
        attn_implementation=attention or ("sdpa" if family == "falcon" else "eager"),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
            elif "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()
