"""Solves for the number of blocks that fit beside activations, logits, workspace and bookkeeping.

Pure arithmetic on a MemoryShape; nothing is measured or allocated here.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from tokenmill_worker.engines.own.config.cache import LayerGroup, most_blocks, numbers_in_block

_RESERVED = 1  # NULL_BLOCK


class DoesNotFitError(ValueError):
    """One sequence of the model's length does not fit; `longest` tokens do (0: none at all)."""

    def __init__(self, longest: int) -> None:
        super().__init__(f"the memory holds no sequence longer than {longest} tokens")
        self.longest = longest


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShape:
    """Sizes that decide a step's memory, beside the weights; element sizes in bytes."""

    groups: tuple[LayerGroup, ...]
    block_size: int
    kv_bytes: int  # per element of the cache
    activation_bytes: int  # per element of the activations
    hidden_size: int
    intermediate_size: int  # summed over the experts that one token passes
    query_size: int  # num_heads × head_dim
    vocab_size: int
    max_num_tokens: int  # query tokens per step
    max_num_rows: int  # sampled rows per step
    max_scored_rows: int = 0  # rows per step whose log-probabilities alone are wanted
    max_num_seqs: int
    max_model_len: int
    workspace_bytes: int = 0  # scratch memory of the attention backend
    # 2 with asynchronous batching: inputs and logits of two steps live at once
    num_buffer_sets: int = 1
    graph_rows: int = 0  # rows of the logits that captured graphs share; 0: no graphs
    graph_tokens: int = 0  # tokens of the largest captured step
    state_bytes: int = 0  # recurrent states of one sequence, checkpoints included

    # ── one block, one sequence ──

    @property
    def block_bytes(self) -> int:
        return numbers_in_block(self.groups, self.block_size) * self.kv_bytes

    def blocks_for(self, length: int) -> int:
        """Return the most blocks that one sequence of `length` tokens ever holds."""
        return sum(
            most_blocks(
                group.window, self.max_num_tokens, self.block_size * group.kernel_blocks, length
            )
            for group in self.groups
        )

    def pool_bytes_for(self, length: int) -> int:
        """Return the bytes of the smallest pool that holds one sequence of `length` tokens."""
        return (_RESERVED + self.blocks_for(length)) * self.block_bytes

    # ── what is not KV ──

    @property
    def activations(self) -> int:
        """Peak bytes of one layer.

        It counts residual, normed input and output, beside queries, keys and values or the MLP's
        inner rows.
        """
        return self.max_num_tokens * self._token_bytes

    @property
    def graphs(self) -> int:
        """Bytes of captured graphs: the activations and logits that all of them share."""
        return (
            self.graph_tokens * self._token_bytes
            + self.graph_rows * self.vocab_size * self.activation_bytes
        )

    @property
    def _token_bytes(self) -> int:
        kv_size = max(group.num_kv_heads * group.head_dim for group in self.groups)
        attention = 3 * self.query_size + 4 * kv_size
        mlp = 5 * self.intermediate_size  # an unfused gelu keeps several rows
        return self.activation_bytes * (5 * self.hidden_size + max(attention, mlp))

    @property
    def logits(self) -> int:
        """Bytes of the head's output, its float32 form, an edited copy, and (log-)probabilities.

        Of scored rows only the output exists at once.
        """
        sampled = self.max_num_rows * (self.activation_bytes + 3 * 4)
        scored = self.max_scored_rows * self.activation_bytes
        return self.num_buffer_sets * self.vocab_size * (sampled + scored)

    @property
    def bookkeeping(self) -> int:
        """Bytes of a step's inputs.

        They are token ids, positions, rows and slots; query starts, lengths and block tables.
        """
        longs = 8 * ((2 + len(self.groups)) * self.max_num_tokens + 3 * self.max_num_rows)
        tables = (
            len(self.groups) * self.max_num_seqs * (-(-self.max_model_len // self.block_size) + 1)
        )
        return self.num_buffer_sets * (longs + 4 * (tables + 2 * self.max_num_seqs + 1))

    @property
    def histories(self) -> int:
        """Bytes of the penalties' tables: output ids and distinct prompt ids of every sequence.

        A third table is counted for the copy that exists while one of the two grows.
        """
        return 3 * 8 * (self.max_num_seqs + 16) * (self.max_model_len + 1024)

    @property
    def fixed(self) -> int:
        steps = self.activations + self.graphs + self.logits + self.bookkeeping
        states = self.max_num_seqs * self.state_bytes
        return steps + self.histories + self.workspace_bytes + states


def solve(shape: MemoryShape, budget_bytes: int, pool_cap_bytes: int | None = None) -> int:
    """Return the blocks, the reserved one included, that fit the budget beside all else.

    Raises:
        DoesNotFitError: the pool cannot hold one sequence of max_model_len.
    """
    room = budget_bytes - shape.fixed
    if pool_cap_bytes is not None:
        room = min(room, pool_cap_bytes)
    if room < shape.pool_bytes_for(shape.max_model_len):
        lengths = range(0, shape.max_model_len + 1, shape.block_size)
        raise DoesNotFitError(
            lengths[max(1, bisect_right(lengths, room, key=shape.pool_bytes_for)) - 1]
        )
    return room // shape.block_bytes
