"""Log-probabilities of one batch composition, after its tokens are drawn.

A row asks for one of two distributions. "raw_logprobs" is the model's own. "processed_logprobs" is
the one that the token was drawn from, after penalties, biases, masks, temperature and truncation.
torch computes both from the logits, also where a kernel drew the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenmill_worker.engines.own.sampling import truncation
from tokenmill_worker.engines.own.sampling.parameter_table import (
    COUNTS,
    GREEDY_BELOW,
    NUMBERS,
    ParameterTable,
    ParamFlags,
)
from tokenmill_worker.engines.own.sampling.transfer import Indices, to_device
from tokenmill_worker.engines.own.sampling.truncation import TruncationLimits


@dataclass(frozen=True, slots=True)
class ChosenLogprobs:
    """Log-probabilities of the rows that asked for them: of the drawn token [n], and of the top
    tokens [n, k] if any.
    """

    drawn: Tensor
    top: Tensor | None
    top_ids: Tensor | None
    order: dict[int, int]  # row of the batch → row here


@dataclass(frozen=True, slots=True)
class _ModeRows:
    """Rows of one mode; `at` is None for every row of the batch.

    The distribution that a row is drawn from needs the two other fields; `inverse_temperature` is
    None for the model's own.
    """

    at: Tensor | None
    inverse_temperature: Tensor | None = None  # [rows, 1] float32
    limits: TruncationLimits | None = None  # None: no row is truncated

    def values(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Return the log-probabilities [rows, vocab], float32, of these rows of the logits."""
        if self.inverse_temperature is None:
            return logits.log_softmax(dim=-1, dtype=torch.float32)
        logits = logits.float()
        scaled = (logits - logits.amax(dim=1, keepdim=True)).mul_(self.inverse_temperature)
        if self.limits is not None:
            # Kernels sum a nucleus in another order, so one may keep a token at its very edge.
            drawn = scaled.gather(1, token_ids[:, None])
            floor = torch.minimum(truncation.floors(scaled, self.limits), drawn)
            scaled.masked_fill_(scaled < floor, -torch.inf)
        return scaled.log_softmax(dim=-1)


@dataclass(frozen=True, slots=True)
class LogprobBatch:
    """Rows of a batch that asked for log-probabilities, at least one."""

    raw: _ModeRows | None
    processed: _ModeRows | None
    num_top: int  # the most that a row asked for
    order: dict[int, int]  # row of the batch → row of the results: raw ones first

    @classmethod
    def build(
        cls, table: ParameterTable, slots: Indices, device: torch.device
    ) -> LogprobBatch | None:
        """Gather the rows of a composition; `slots` is each row's index in the parameter table.

        Returns None if no row asked for log-probabilities.
        """
        flags = table.flags[slots]
        is_wanted = (flags & int(ParamFlags.LOGPROBS)) != 0
        if not is_wanted.any():
            return None
        is_processed = (flags & int(ParamFlags.PROCESSED_LOGPROBS)) != 0
        raw = np.flatnonzero(is_wanted & ~is_processed)
        processed = np.flatnonzero(is_wanted & is_processed)

        def at(rows: Indices) -> Tensor | None:
            return None if len(rows) == len(slots) else to_device(rows, device)

        return cls(
            raw=_ModeRows(at(raw)) if len(raw) else None,
            processed=_ModeRows(at(processed), *_scaling(table, slots[processed], device))
            if len(processed)
            else None,
            num_top=int(table.counts[slots, COUNTS.index("num_top_logprobs")].max(initial=0)),
            order={int(row): i for i, row in enumerate((*raw, *processed))},
        )

    def choose(self, raw: Tensor, edited: Tensor, token_ids: Tensor) -> ChosenLogprobs:
        """Return the log-probabilities of the drawn tokens and of the most likely ones.

        Args:
            raw: The model's logits [rows, vocab].
            edited: The logits after penalties, biases and masks [rows, vocab].
            token_ids: The drawn tokens [rows].
        """
        count = min(self.num_top, raw.shape[1])
        drawn, top, top_ids = [], [], []
        for rows, logits in ((self.raw, raw), (self.processed, edited)):
            if rows is None:
                continue
            ids = token_ids if rows.at is None else token_ids[rows.at]
            values = rows.values(logits if rows.at is None else logits[rows.at], ids)
            drawn.append(values.gather(1, ids[:, None]).squeeze(1))
            if count:
                best = values.topk(count, dim=-1)
                top.append(best.values)
                top_ids.append(best.indices)
        if not count:
            return ChosenLogprobs(torch.cat(drawn), None, None, self.order)
        return ChosenLogprobs(torch.cat(drawn), torch.cat(top), torch.cat(top_ids), self.order)


def _scaling(
    table: ParameterTable, slots: Indices, device: torch.device
) -> tuple[Tensor, TruncationLimits | None]:
    """Return what scales and truncates these rows: inverse temperatures, and limits if any row has
    one.

    At temperature 0 nothing is drawn. Such a row has the probabilities of temperature 1 without
    truncation, as in Transformers and vLLM.
    """
    numbers = table.numbers[slots]
    temperature = numbers[:, NUMBERS.index("temperature"), None]
    is_cold = temperature < GREEDY_BELOW
    inverse = 1.0 / np.where(is_cold, 1.0, temperature)
    top_k = table.counts[slots, COUNTS.index("top_k"), None]
    top_k = np.where(is_cold, table.vocab_size, top_k)
    top_p = np.where(is_cold, 1.0, numbers[:, NUMBERS.index("top_p"), None])
    log_min_p = np.where(is_cold, -np.inf, numbers[:, NUMBERS.index("log_min_p"), None])
    on_device = to_device(inverse.astype(np.float32), device)
    limited = top_k[top_k < table.vocab_size]
    if not len(limited) and (top_p >= 1.0).all() and not np.isfinite(log_min_p).any():
        return on_device, None
    return on_device, TruncationLimits(
        top_k=to_device(top_k, device),
        top_p=to_device(top_p, device),
        log_min_p=to_device(log_min_p.astype(np.float32), device),
        max_top_k=int(limited.max(initial=0)),
        bounded=len(limited) == len(top_k),
    )
