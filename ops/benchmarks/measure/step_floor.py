"""Counts the least time of a model's step on a device: that of what each operation must do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    bytes_s: float
    operations_s: float
    copied_bytes_s: float = 0.0  # read and written
    read_bytes_s: float = 0.0

    def seconds(self, num_bytes: float, operations: float) -> float:
        """Return the least time of one kernel: that of its bytes or that of its operations."""
        return max(num_bytes / self.bytes_s, operations / self.operations_s)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one step."""

    tokens: int  # rows of the layers' products
    sampled: int  # rows of the head's
    read: int  # tokens whose keys and values are read
    pairs: int  # (query, key) pairs of each head
    weight_bytes: int = 2  # of one weight
    kv_bytes: int = 2  # of one key's or value's number


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

    def floor_s(self, ceilings: Ceilings, work: Work) -> float:
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


SHAPES = {
    "llama-3-8b": Shape("llama", 4096, 32, 32, 8, 128, 14_336, 128_256),
    "qwen3-4b": Shape("qwen3", 2560, 36, 32, 8, 128, 9728, 151_936),
    "tiny": Shape("llama", 64, 2, 4, 2, 16, 128, 512),
}
