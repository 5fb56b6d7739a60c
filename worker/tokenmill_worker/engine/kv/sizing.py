"""Solves for the number of blocks that fit beside activations, logits, workspace and bookkeeping.

Pure arithmetic on a MemoryShape; nothing is measured or allocated here. A sequence needs only a
bounded number of blocks in a sliding-window group. The groups therefore get blocks in the
proportion in which sequences use them, at the greatest length at which `max_num_seqs` sequences fit
at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tokenmill_worker.engine.cache_config import LayerGroup

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

    # ── one block, one sequence ──

    def block_bytes(self, group: LayerGroup) -> int:
        return (
            len(group.layers)
            * 2
            * self.block_size
            * group.num_kv_heads
            * group.head_dim
            * self.kv_bytes
        )

    def blocks_for(self, group: LayerGroup, length: int) -> int:
        """Return the most blocks of a group that one sequence of `length` tokens ever holds."""
        whole = -(-length // self.block_size)
        if group.window is None:
            return whole
        reach = group.window - 1 + min(self.max_num_tokens, length)
        return min(whole, -(-reach // self.block_size) + 1)

    def sequence_bytes(self, length: int) -> int:
        return sum(
            self.block_bytes(group) * self.blocks_for(group, length) for group in self.groups
        )

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
        return steps + self.histories + self.workspace_bytes


def solve(
    shape: MemoryShape, budget_bytes: int, pool_cap_bytes: int | None = None
) -> tuple[int, ...]:
    """Return each group's blocks, the reserved one included, that fit the budget beside all else.

    Raises:
        DoesNotFitError: the pools cannot hold one sequence of max_model_len.
    """
    room = budget_bytes - shape.fixed
    if pool_cap_bytes is not None:
        room = min(room, pool_cap_bytes)
    room -= sum(_RESERVED * shape.block_bytes(group) for group in shape.groups)
    if room < shape.sequence_bytes(shape.max_model_len):
        raise DoesNotFitError(_longest(shape, room, 1))
    length = _longest(shape, room, shape.max_num_seqs)
    if length == shape.max_model_len or length < shape.block_size:
        counts = _scale(shape, room, shape.max_model_len)
    else:
        counts = [shape.max_num_seqs * shape.blocks_for(group, length) for group in shape.groups]
        counts = _at_least_one_sequence(shape, room, counts)
    return tuple(_RESERVED + count for count in _fill(shape, room, counts))


def host_blocks(shape: MemoryShape, num_blocks: Seq[int], host_bytes: int) -> tuple[int, ...]:
    """Return the host pool's blocks per group, in the proportion of the device pools."""
    device_bytes = pool_bytes(shape, num_blocks)
    return tuple(int(count * host_bytes / device_bytes) for count in num_blocks)


def pool_bytes(shape: MemoryShape, num_blocks: Seq[int]) -> int:
    """Return the bytes of the pools of all groups."""
    return sum(
        shape.block_bytes(g) * count for g, count in zip(shape.groups, num_blocks, strict=True)
    )


def _longest(shape: MemoryShape, room: int, num_seqs: int) -> int:
    """Return the greatest length at which num_seqs sequences fit, by bisection.

    It is a whole number of blocks, or max_model_len.
    """
    if num_seqs * shape.sequence_bytes(shape.max_model_len) <= room:
        return shape.max_model_len
    low, high = 0, -(-shape.max_model_len // shape.block_size)
    while high - low > 1:
        middle = (low + high) // 2
        fits = num_seqs * shape.sequence_bytes(middle * shape.block_size) <= room
        low, high = (middle, high) if fits else (low, middle)
    return low * shape.block_size


def _scale(shape: MemoryShape, room: int, length: int) -> list[int]:
    """Return the blocks per group of as many whole sequences of this length as fit."""
    count = room // shape.sequence_bytes(length)
    return [count * shape.blocks_for(group, length) for group in shape.groups]


def _at_least_one_sequence(shape: MemoryShape, room: int, counts: list[int]) -> list[int]:
    """Raise each group to the blocks of one sequence of max_model_len.

    Groups that have more than that give up blocks for it.
    """
    floors = [shape.blocks_for(group, shape.max_model_len) for group in shape.groups]
    raised = [max(count, floor) for count, floor in zip(counts, floors, strict=True)]
    sizes = [shape.block_bytes(group) for group in shape.groups]
    spare = sum(
        (count - floor) * size for count, floor, size in zip(raised, floors, sizes, strict=True)
    )
    left = room - sum(floor * size for floor, size in zip(floors, sizes, strict=True))
    if spare <= left:
        return raised
    return [
        floor + int((count - floor) * left / spare)
        for count, floor in zip(raised, floors, strict=True)
    ]


def _fill(shape: MemoryShape, room: int, counts: list[int]) -> list[int]:
    """Distribute the memory that is left over, in proportion, until no block of any group fits.

    The additional blocks enlarge the prefix cache.
    """
    sizes = [shape.block_bytes(group) for group in shape.groups]
    left = room - sum(count * size for count, size in zip(counts, sizes, strict=True))
    used = sum(count * size for count, size in zip(counts, sizes, strict=True))
    if used:
        extra = [int(count * left / used) for count in counts]
        counts = [count + more for count, more in zip(counts, extra, strict=True)]
        left -= sum(more * size for more, size in zip(extra, sizes, strict=True))
    for index, size in sorted(enumerate(sizes), key=lambda pair: -pair[1]):
        counts[index] += left // size
        left %= size
    return counts
