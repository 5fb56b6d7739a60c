"""Tokens that a launched step samples and that the host does not have yet (asynchronous
batching).
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sampling.sampled import RowSpan, Sampled
from tokenmill_worker.engines.own.sequence import Sequence


class NotArrived(Exception):
    """The last token of a sequence has not reached the host."""


class InFlightTokens:
    """The newest launched step of each sequence whose next step must know its token."""

    def __init__(self) -> None:
        # step, its row, output position
        self._launched: dict[Sequence, tuple[Sampled, int, int]] = {}

    def launched(
        self, sampled: Sampled, items: Iterable[tuple[ScheduledSequence, RowSpan]]
    ) -> None:
        """Record the step that samples the token of each of these items.

        The next step reads the token there if it is planned before the token has reached the host.
        A step with drafts is not followed by such a one.
        """
        for item, span in items:
            if not item.draft_ids:
                position = item.start + item.num_tokens - item.sequence.num_prompt_tokens
                self._launched[item.sequence] = (sampled, span.first, position)

    def of(self, sequence: Sequence) -> list[int]:
        """Return the token that a launched step samples; none if the host has all tokens.

        It is read from that step itself, whose forward pass ends before the next one begins.
        Raises NotArrived where that step is not known.
        """
        if not sequence.num_inflight:
            return []
        sampled, row, position = self._launched.get(sequence, (None, 0, -1))
        if sampled is None or sequence.num_inflight > 1 or position != sequence.num_output_tokens:
            raise NotArrived("its last token has not reached the host")
        return [sampled.wait_for(row)]

    def release(self, sequence: Sequence) -> None:
        self._launched.pop(sequence, None)
