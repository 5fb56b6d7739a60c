"""The meaning of a FlashAttention call over blocks, computed in float64 from the block table."""

from __future__ import annotations

import torch
from torch import Tensor


def paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention's meaning: causal, aligned at the end; `lse` [num_heads, num_tokens].

    A window of (−1, 0) is none. A sink is one more logit of its head, without a value.
    """
    assert table.dtype == seq_lens.dtype == query_start.dtype == torch.int32
    assert query.is_contiguous()
    assert keys.stride(-1) == 1
    assert window[1] == 0
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[1], query.shape[0])
    starts, block_size, group = query_start.tolist(), keys.shape[1], query.shape[1] // keys.shape[2]
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        at = torch.arange(seq_len)
        block = table[i, at // block_size].long()
        key = keys[block, at % block_size].double().repeat_interleave(group, dim=1)
        value = values[block, at % block_size].double().repeat_interleave(group, dim=1)
        logits = torch.einsum("qhd,khd->hqk", query[rows].double(), key) * scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        distance = torch.arange(seq_len - (rows.stop - rows.start), seq_len)[:, None] - at[None]
        hidden = (distance < 0) | (
            (distance > window[0]) if window[0] >= 0 else torch.zeros_like(distance).bool()
        )
        logits = logits.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, logits.shape[1], 1)
            logits = torch.cat([logits, column], dim=-1)
        weights = logits.softmax(-1)[..., :seq_len]
        # a block that left the window is not read
        value = torch.where(hidden.all(0)[:, None, None], 0.0, value)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
        lse[:, rows] = logits.logsumexp(-1).float()
    return out, lse
