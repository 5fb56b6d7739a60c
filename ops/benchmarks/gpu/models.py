"""Models of known shapes with random weights on the device, and what their steps move and compute.

The same seed gives the same weights, so two engines can each have a model of their own.
"""

import gc
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tokenmill_worker.engine import EngineConfig
from tokenmill_worker.engine.execution.build import pick_device
from tokenmill_worker.engine.model.loader import LoadedModel, describe_model
from tokenmill_worker.engine.model.paged_attention import IMPLEMENTATION, register


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with the fields of its configuration.

    The embedding is not counted, because its rows are only looked up.
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 16_384

    @property
    def num_weights(self) -> int:
        """Number of weights that one token is multiplied with."""
        heads = self.num_attention_heads + 2 * self.num_key_value_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_attention_heads)
        return (
            self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)
            + self.head_weights
        )

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        return (
            2
            * self.num_hidden_layers
            * self.num_key_value_heads
            * self.head_dim
            * tokens
            * itemsize
        )

    def attention_operations(self, pairs: int) -> int:
        """Count the operations of attention for (query, key) pairs: logits and value sums."""
        return 4 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * pairs

    def prefill_operations(self, tokens: int) -> int:
        """Count the products of every token, the head of one token, and causal attention."""
        products = 2 * (self.num_weights - self.head_weights) * tokens + 2 * self.head_weights
        return products + self.attention_operations(tokens * (tokens + 1) // 2)


SHAPES = {
    "llama-3-8b": Shape("llama", 4096, 32, 32, 8, 128, 14_336, 128_256),
    "qwen3-4b": Shape("qwen3", 2560, 36, 32, 8, 128, 9728, 151_936),
    "tiny": Shape("llama", 64, 2, 4, 2, 16, 128, 512),
}


def random_model(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """Build the model with our attention, directly on the device; nothing is written to disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    fields = asdict(shape)
    config = AutoConfig.for_model(
        fields.pop("model_type"), **fields, tie_word_embeddings=False, eos_token_id=0
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=IMPLEMENTATION
        )
    return model.eval().requires_grad_(False)


def describe(model: Any, config: EngineConfig) -> LoadedModel:
    """Return the model as the engine's loader would; fuses it if the configuration says so."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return describe_model(model, Path(folder), config, pick_device(config.device))


def fused_modules(model: Any) -> dict[str, int]:
    """Count the model's replaced modules by class name."""
    kinds = (type(module) for module in model.modules())
    return dict(
        Counter(kind.__name__ for kind in kinds if kind.__module__.startswith("tokenmill_worker."))
    )


def forget() -> None:
    """Free the memory of dropped objects, on the GPU too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
