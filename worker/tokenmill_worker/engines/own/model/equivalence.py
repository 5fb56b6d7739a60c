"""Tests whether a replacement computes the same as the original module.

Both run on the same random rows, small, usual and large ones: an epsilon shows on small rows, a
clamp on large ones. Attention modules run with a step that records what reached the cache. A module
that cannot be called in this way is never replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.attention import AttentionMetadata

log = logging.getLogger(__name__)

# share of a row's largest value; float32 sums in another order differ by about 1e-6
TOLERANCE = 2e-4
_SIZES = (0.003, 0.1, 1.0, 1.0, 40.0)


@torch.inference_mode()
def is_equivalent(
    original: Callable[[Tensor], Tensor], candidate: Callable[[Tensor], Tensor], width: int
) -> bool:
    """Return whether both map hidden states `[1, num_tokens, width]` to equal results."""
    rows = random_rows(width)
    try:
        return close(original(rows), candidate(rows.clone()))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an unusual signature: this module stays as it is
        log.debug("A module is not fused: %s", error)
        return False


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether each row is equal within the tolerance, so that large rows do not hide errors
    of small ones.
    """
    if a.shape != b.shape:
        return False
    bound = TOLERANCE * a.abs().amax(dim=-1).clamp_min(1e-12)
    return bool(((a - b).abs().amax(dim=-1) <= bound).all())


def random_rows(width: int, device: torch.device | str = "cpu") -> Tensor:
    """Return hidden states `[1, num_tokens, width]`, the same on every call."""
    rows = torch.randn(len(_SIZES), width, generator=torch.Generator().manual_seed(1))
    return (rows * torch.tensor(_SIZES)[:, None])[None].to(device)


def two_prompts(block_size: int, device: torch.device | str = "cpu") -> AttentionMetadata:
    """Return the metadata of `random_rows` as prompts of two and three tokens, in blocks 1 and
    2.
    """
    lens = (2, 3)
    slots = [
        block_size * (1 + index) + offset
        for index, length in enumerate(lens)
        for offset in range(length)
    ]

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return AttentionMetadata(
        query_start=ints([0, 2, 5]), seq_lens=ints(lens), block_table=ints([[1], [2]]),
        slot_mapping=ints(slots, torch.int64), max_query_len=max(lens), max_seq_len=max(lens),
        block_size=block_size,
        window=None, query_lens_host=lens, seq_lens_host=lens,
    )  # fmt: skip


@dataclass(slots=True)
class AttentionCall:
    """A step that records the arguments of attention and returns a function of them, and then the
    module's output.
    """

    seen: list[Tensor] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        extras: dict[str, Any],
    ) -> Tensor:
        self.seen = [query, key, value, torch.tensor([scale])]
        self.extras = {name: extra for name, extra in extras.items() if extra is not None}
        return query * 2.0 + value.mean(dim=1, keepdim=True)

    def is_equivalent_to(self, other: AttentionCall) -> bool:
        """Return whether queries, keys, values, scale, further arguments and output are equal in
        both calls.
        """
        if self.extras.keys() != other.extras.keys() or len(self.seen) != len(other.seen):
            return False
        return all(close(a, b) for a, b in zip(self.seen, other.seen, strict=True))


def random_tables(rotary_dim: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return cosines and sines for `random_rows`, `[1, num_tokens, rotary_dim]`."""
    angles = torch.randn(len(_SIZES), rotary_dim // 2, generator=torch.Generator().manual_seed(2))
    angles = angles.repeat(1, 2)[None].to(device)
    return angles.cos(), angles.sin()


@torch.inference_mode()
def call_attention(module: nn.Module, width: int, rotary_dim: int) -> AttentionCall | None:
    """Run the module with a recording step; return None where it cannot be called like a decoder's
    usual attention.
    """
    call = AttentionCall()
    weight = next(module.parameters(), torch.empty(0))  # packed modules have none: float32, CPU
    arguments = {
        "hidden_states": random_rows(width).to(weight),
        "position_embeddings": tuple(table.to(weight) for table in random_tables(rotary_dim)),
    }
    try:
        out: Tensor = module(**arguments, attention_mask=None, past_key_values=None, paged=call)[0]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.debug("A module is not fused: %s", error)
        return None
    call.seen.append(out)
    return call


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding by halves.

    `x` is `[num_tokens, heads, head_dim]`, `cos` and `sin` are `[num_tokens, rotary_dim]`.
    """
    width = cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    low, high = turned.chunk(2, dim=-1)
    crossed = torch.cat([-high, low], dim=-1)
    return torch.cat([turned * cos[:, None] + crossed * sin[:, None], kept], dim=-1)
