"""Models of known shapes with random weights on the device, and the least time of their steps.

The same seed gives the same weights, so two engines can each have a model of their own.
"""

import gc
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ops.benchmarks.gpu.ceilings import Ceilings
from tokenmill_worker.engine import EngineConfig
from tokenmill_worker.engine.execution.build import pick_device
from tokenmill_worker.engine.model.loader import LoadedModel, describe_model
from tokenmill_worker.engine.model.paged_attention import IMPLEMENTATION, register


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with the fields of its configuration.

    The embedding is no product: its rows are only looked up.
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
    def products(self) -> list[tuple[int, int, int]]:
        """The products of one token: (outputs, inputs, number of layers), the head last."""
        hidden, layers = self.hidden_size, self.num_hidden_layers
        heads = self.num_attention_heads * self.head_dim
        kv_heads = self.num_key_value_heads * self.head_dim
        return [
            (heads + 2 * kv_heads, hidden, layers),
            (hidden, heads, layers),
            (2 * self.intermediate_size, hidden, layers),
            (hidden, self.intermediate_size, layers),
            (self.vocab_size, hidden, 1),
        ]

    @property
    def num_weights(self) -> int:
        """Number of weights that one token is multiplied with."""
        return sum(n * k * layers for n, k, layers in self.products)

    def floor_s(self, ceilings: Ceilings, work: "Work") -> float:
        """Return the least time of a step: the sum of its products' and its attention's.

        Each product takes the time of its weights' bytes or of its operations, whichever is longer,
        and so does attention. At a large batch, operations bound the former and bytes the latter.
        """
        *body, head = self.products
        each = [(n, k, layers, work.tokens) for n, k, layers in body] + [(*head, work.sampled)]
        products_s = sum(
            layers * ceilings.seconds(n * k * work.weight_bytes, 2 * n * k * rows)
            for n, k, layers, rows in each
        )
        kept = 2 * self.num_key_value_heads * self.head_dim * work.read * work.kv_bytes
        pairs = 4 * self.num_attention_heads * self.head_dim * work.pairs
        return products_s + self.num_hidden_layers * ceilings.seconds(kept, pairs)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one step.

    Args:
        tokens: rows of the layers' products.
        sampled: rows of the head's.
        read: tokens whose keys and values are read.
        pairs: (query, key) pairs of each head.
        weight_bytes: of one weight.
        kv_bytes: of one key's or value's number.
    """

    tokens: int
    sampled: int
    read: int
    pairs: int
    weight_bytes: int
    kv_bytes: int


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
