"""Sampled tokens of one step: on the device at once, on the host after `finish`.

Copies to the host start after the sampling kernels. `finish` waits for them, cuts each sequence's
rows at the first rejected draft, and builds the host's values.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from tokenmill_schemas.generation import SamplingParams, TokenLogprob
from tokenmill_worker.engines.own.plan import RequestFault
from tokenmill_worker.engines.own.sampling.logprobs import ChosenLogprobs

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
NOTHING_ALLOWED = RequestFault(
    "no token is allowed here: masks and biases exclude the whole vocabulary"
)

Finished = tuple[
    tuple[tuple[int, ...], ...], tuple[tuple[TokenLogprob, ...] | None, ...], dict[int, str]
]


class RowSpan(msgspec.Struct, frozen=True, gc=False):
    """Rows of one item: [first, first + 1 + len(draft_ids)).

    One is built per sequence and step; a msgspec struct is cheaper than a dataclass.
    """

    first: int
    draft_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft_ids)


class Sampled:
    """Result of one step; `token_ids` [rows] is on the device and may feed the next step before
    `finish`.
    """

    __slots__ = ("_errors", "_ids", "_logprobs", "_peaks", "_ready", "_spans", "token_ids")

    def __init__(
        self,
        token_ids: Tensor,
        host: tuple[Tensor, Tensor, ChosenLogprobs | None],
        spans: list[RowSpan],
        errors: dict[int, str],
        ready: torch.cuda.Event | None,
    ) -> None:
        self.token_ids = token_ids
        self._ids, self._peaks, self._logprobs = host
        self._spans = spans
        self._errors = errors
        self._ready = ready

    @classmethod
    def start(
        cls,
        token_ids: Tensor,
        peaks: Tensor,
        chosen: ChosenLogprobs | None,
        spans: list[RowSpan],
        errors: dict[int, str],
    ) -> Sampled:
        """Begin the copies to the host; they go to pinned memory, after the work already queued on
        the device.
        """
        if token_ids.device.type != "cuda":
            return cls(token_ids, (token_ids, peaks, chosen), spans, errors, None)
        if chosen is not None:
            chosen = ChosenLogprobs(
                chosen.drawn.to("cpu", non_blocking=True),
                None if chosen.top is None else chosen.top.to("cpu", non_blocking=True),
                None if chosen.top_ids is None else chosen.top_ids.to("cpu", non_blocking=True),
                chosen.order,
            )
        host = (token_ids.to("cpu", non_blocking=True), peaks.to("cpu", non_blocking=True), chosen)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return cls(token_ids, host, spans, errors, ready)

    def wait_for(self, row: int) -> int:
        """Wait until this step, and none launched after it, has finished; return one row's
        token.
        """
        if self._ready is not None:
            self._ready.synchronize()
        return int(self._ids[row])

    def finish(self) -> Finished:
        """Wait for the copies and build the host's values.

        Returns each item's tokens, its log-probabilities (None if not requested), and errors by
        item index.
        """
        if self._ready is not None:
            self._ready.synchronize()
        ids, peaks = self._ids.tolist(), self._peaks.tolist()
        is_plain = self._logprobs is None and not self._errors and len(ids) == len(self._spans)
        if is_plain and all(map(math.isfinite, peaks)):
            return tuple(zip(ids, strict=True)), (None,) * len(ids), {}
        logprobs = _Table(self._logprobs) if self._logprobs is not None else None
        errors = dict(self._errors)
        tokens: list[tuple[int, ...]] = []
        scores: list[tuple[TokenLogprob, ...] | None] = []
        for index, span in enumerate(self._spans):
            rows = range(span.first, span.first + accepted_rows(ids, span))
            bad = [peaks[row] for row in rows if not math.isfinite(peaks[row])]
            if bad and index not in errors:
                errors[index] = NOTHING_ALLOWED if bad[0] == -math.inf else NOT_FINITE
            if index in errors:
                rows = range(0)
            tokens.append(tuple(ids[row] for row in rows))
            wanted = logprobs is not None and span.params.wants_logprobs
            scores.append(
                tuple(logprobs.of(row, span.params) for row in rows)
                if wanted and logprobs
                else None
            )
        return tuple(tokens), tuple(scores), errors


def accepted_rows(ids: list[int], span: RowSpan) -> int:
    """Count an item's valid rows: up to and including the first one that drew another token than
    its draft.
    """
    for index, draft in enumerate(span.draft_ids):
        if ids[span.first + index] != draft:
            return index + 1
    return span.num_rows


class _Table:
    """Log-probabilities as host lists. A token of probability 0 is not listed."""

    def __init__(self, chosen: ChosenLogprobs) -> None:
        self._order = chosen.order
        self._drawn: list[float] = chosen.drawn.tolist()
        self._top: list[list[float]] = [] if chosen.top is None else chosen.top.tolist()
        self._top_ids: list[list[int]] = [] if chosen.top_ids is None else chosen.top_ids.tolist()

    def of(self, row: int, params: SamplingParams) -> TokenLogprob:
        index = self._order[row]
        count = params.num_top_logprobs
        if not count:
            return TokenLogprob(self._drawn[index])
        pairs = zip(self._top_ids[index][:count], self._top[index][:count], strict=True)
        return TokenLogprob(
            self._drawn[index], tuple(pair for pair in pairs if pair[1] != -math.inf)
        )
