"""Log-probabilities of given tokens: those of a prompt, or of an answer that the caller gave.

They are of the model's own distribution. The rows of a step are normalised a few at a time, so that
its logits exist once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenmill_schemas.generation import TokenLogprob
from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sampling.sampled import NOT_FINITE
from tokenmill_worker.engines.own.sampling.transfer import Indices, to_device

_ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The rows of a step's logits that belong to given tokens, and the other rows."""

    scored: Indices  # [scored]
    sampled: Indices  # [rows - scored]
    token_ids: Indices  # [scored]
    counts: dict[int, tuple[int, int]]  # index of the item → scored tokens, top tokens
    num_top: int  # the most top tokens that an item asks for

    @classmethod
    def of(cls, items: Seq[ScheduledSequence]) -> ScoredRows | None:
        """Find the rows of a plan's items, in the order of `InputBuilder`.

        Returns None if no item has tokens to score.
        """
        if not any(item.num_scored for item in items):
            return None
        scored: list[int] = []
        sampled: list[int] = []
        token_ids: list[int] = []
        counts: dict[int, tuple[int, int]] = {}
        row = 0
        for index, item in enumerate(items):
            if item.num_scored:
                first, sequence = item.scored_from, item.sequence
                scored.extend(range(row, row + item.num_scored))
                token_ids += sequence.token_ids[first : first + item.num_scored]
                counts[index] = (item.num_scored, sequence.num_top_scored)
                row += item.num_scored
            if item.samples:
                sampled.extend(range(row, row + 1 + len(item.draft_ids)))
                row += 1 + len(item.draft_ids)
        return cls(
            np.array(scored, np.int64),
            np.array(sampled, np.int64),
            np.array(token_ids, np.int64),
            counts,
            max(top for _, top in counts.values()),
        )

    def take(self, logits: Tensor, vocab_size: int) -> tuple[Tensor, Scores]:
        """Compute the log-probabilities of the scored rows.

        Args:
            logits: [rows, vocab or more].

        Returns:
            The logits of the other rows, and the scores on their way to the host.
        """
        device = logits.device
        rows, ids = to_device(self.scored, device), to_device(self.token_ids, device)
        count = min(self.num_top, vocab_size)
        values, top, top_ids = [], [], []
        parts = torch.split(rows, _ROWS_AT_ONCE)
        for part, wanted in zip(parts, torch.split(ids, _ROWS_AT_ONCE), strict=True):
            found = logits[part, :vocab_size].log_softmax(dim=-1, dtype=torch.float32)
            values.append(found.gather(1, wanted[:, None]).squeeze(1))
            best = found.topk(count, dim=-1)
            top.append(best.values)
            top_ids.append(best.indices)
        scores = Scores.start(self.counts, (torch.cat(values), torch.cat(top), torch.cat(top_ids)))
        return logits[to_device(self.sampled, device)], scores


class Scores:
    """The scores of one step: on the device at once, on the host after `finish`."""

    __slots__ = ("_counts", "_ready", "_tensors")

    def __init__(
        self,
        counts: dict[int, tuple[int, int]],
        tensors: tuple[Tensor, Tensor, Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        self._counts, self._tensors, self._ready = counts, tensors, ready

    @classmethod
    def start(
        cls, counts: dict[int, tuple[int, int]], tensors: tuple[Tensor, Tensor, Tensor]
    ) -> Scores:
        """Begin the copies to the host of log-probabilities [scored], and of the most likely ones
        and their token ids [scored, k].
        """
        if tensors[0].device.type != "cuda":
            return cls(counts, tensors, None)
        values, top, top_ids = (tensor.to("cpu", non_blocking=True) for tensor in tensors)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return cls(counts, (values, top, top_ids), ready)

    def finish(self) -> tuple[dict[int, tuple[TokenLogprob, ...]], dict[int, str]]:
        """Wait for the copies; return each item's log-probabilities, and errors by item index."""
        if self._ready is not None:
            self._ready.synchronize()
        values, top, top_ids = (tensor.tolist() for tensor in self._tensors)
        found: dict[int, tuple[TokenLogprob, ...]] = {}
        errors: dict[int, str] = {}
        row = 0
        for index, (count, num_top) in self._counts.items():
            rows = range(row, row + count)
            row += count
            if any(math.isnan(values[i]) for i in rows):
                errors[index] = NOT_FINITE
            found[index] = tuple(
                TokenLogprob(
                    values[i],
                    tuple(zip(top_ids[i][:num_top], top[i][:num_top], strict=True)),
                )
                for i in rows
            )
        return found, errors
