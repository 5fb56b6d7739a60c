"""Says which sequences may draft before a step is planned, and reserves slots for their drafts."""

from __future__ import annotations

from tokenmill_worker.engines.own.plan import MAX_DRAFTS
from tokenmill_worker.engines.own.scheduler.state import SchedulerState
from tokenmill_worker.engines.own.sequence import Sequence


class Lookahead:
    """The state of a scheduler as a draft model sees it."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    @property
    def num_decoding(self) -> int:
        return len(self._state.decoding)

    @property
    def num_free_drafts(self) -> int:
        """Drafts that a step has room for beside a token of each running sequence."""
        return min(MAX_DRAFTS, self._state.config.max_num_batched_tokens - self._state.num_running)

    def sequences(self) -> list[tuple[Sequence, int]]:
        """Return the decoding sequences that may draft, and how many drafts each can use."""
        return [
            (sequence, room)
            for sequence in self._state.decoding
            if sequence.params.speculate
            and sequence.num_computed_tokens == sequence.num_tokens - 1
            and (room := sequence.max_tokens - sequence.num_output_tokens - 1) > 0
        ]

    def reserve(self, sequence: Sequence, num_drafts: int) -> int:
        """Take blocks for drafts, as far as no running sequence may need them for its next token.

        Return how many drafts have slots.
        """
        kv, end = self._state.kv, sequence.num_tokens + num_drafts
        needed = self._state.num_running * len(kv.block_sizes)
        if end > sequence.num_slots and kv.lacks(sequence, end) + needed <= kv.pool.num_free:
            kv.grow(sequence, end)
        return min(num_drafts, max(0, sequence.num_slots - sequence.num_tokens))
