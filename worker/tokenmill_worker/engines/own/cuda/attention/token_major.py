"""Shared parts of the FlashAttention backends: token-major blocks, and sinks applied afterwards.

A block is `[token, kv_head, head_dim]`. FlashAttention 2 and 3 take no sinks, but they
return the logarithm of each row's softmax denominator (lse). One more logit in the denominator
scales the row by sigmoid(lse − sink).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
)

DTYPES = (torch.bfloat16, torch.float16)
FA2_BLOCK_MULTIPLE = 256  # FlashAttention 2 reads pages of this many tokens, or multiples


class TokenMajorBackend(AttentionBackend):
    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return block_size, num_kv_heads, head_dim

    def write(self, key: Tensor, value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        if cache.is_cuda:
            from tokenmill_worker.engines.own.cuda.attention.triton import write_blocks

            write_blocks(
                key,
                value,
                cache,
                metadata,
                token_stride=cache.stride(2),
                head_stride=cache.stride(3),
            )
            return
        block = torch.div(metadata.slot_mapping, metadata.block_size, rounding_mode="floor")
        offset = metadata.slot_mapping - block * metadata.block_size
        cache[:, 0].index_put_((block, offset), key.to(cache.dtype))
        cache[:, 1].index_put_((block, offset), value.to(cache.dtype))

    def token_and_head_strides(self, cache: Tensor) -> tuple[int, int]:
        return cache.stride(2), cache.stride(3)


def refusal(
    library: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: AttentionShape,
    block_size: int,
    multiple: int,
) -> str | None:
    """Return why a FlashAttention library cannot serve this layer, or None if it can.

    These rules hold for every version. `multiple`: block sizes must be multiples of it.
    """
    if device.type != "cuda":
        return f"{library} does not run on {device.type}"
    if dtype not in DTYPES:
        return f"{library} takes bfloat16 and float16, not {dtype}"
    if shape.head_dim % 8 or shape.head_dim > 256:
        return f"{library} takes head sizes that are multiples of 8 up to 256, not {shape.head_dim}"
    if shape.is_chunked:
        return f"{library} has no chunked attention"
    if block_size % multiple:
        return f"{library} takes block sizes that are multiples of {multiple}, not {block_size}"
    return None


def window_of(metadata: AttentionMetadata) -> tuple[int, int]:
    """Return (left, right): positions before and after its own that a query sees; −1: all of
    them.
    """
    return (-1 if metadata.window is None else metadata.window.size - 1, 0)


def cumulative(seq_lens: Tensor) -> Tensor:
    """Return the cumulative lengths from 0 on, int32 `[num_seqs + 1]`.

    They are computed on the device, so that a captured graph uses the current lengths.
    """
    result = torch.zeros(seq_lens.shape[0] + 1, dtype=torch.int32, device=seq_lens.device)
    torch.cumsum(seq_lens, 0, dtype=torch.int32, out=result[1:])
    return result


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Apply attention sinks to a finished result.

    Args:
        out: `[num_tokens, num_heads, head_dim]`.
        lse: `[num_heads, num_tokens]`, the logarithm of each row's softmax denominator.
        sinks: `[num_heads]`.
    """
    kept = torch.sigmoid(lse.float() - sinks.float()[:, None])
    return out * kept.t()[:, :, None].to(out.dtype)


def without_garbage(out: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Set rows of padding, which FlashAttention leaves unwritten, to zero.

    The next layer writes keys and values of these rows to the null block. A kernel may multiply
    them by a weight of zero (a block that left its window), so they must be finite. In a graph only
    the device has the number of rows.
    """
    if metadata.query_lens_host:
        used = sum(metadata.query_lens_host)
        if used < out.shape[0]:
            out[used:] = 0
    elif metadata.max_query_len != 1:  # in a padded decode each row belongs to a sequence
        rows = torch.arange(out.shape[0], device=out.device)
        out.masked_fill_((rows >= metadata.query_start[-1])[:, None, None], 0)
    return out
