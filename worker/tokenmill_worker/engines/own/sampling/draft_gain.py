"""Measures what a draft model costs and gains, in seconds, and stops it where it does not pay.

A step gains the time of the tokens that it did not have to wait for: each accepted draft saves the
share of one sequence in a step without drafts. It costs the time of drafting, and the time by which
drafts lengthen the step. The balance of both is a credit. Drafts are made while it is positive. It
also grows by a hundredth of all time, which later tries may cost. So drafts that never pay slow the
engine down by 1 % and ALLOWANCE_S at most, and drafts that begin to pay are found.

Plain Python; the caller supplies the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

ALLOWANCE_S: Final = 0.25  # credit at the start
_MOST_S: Final = 1.0  # credit is kept in [−_MOST_S, _MOST_S], so that changes show soon
_TRIES: Final = 0.01  # of all time
_PLAIN_EVERY: Final = 32  # steps; one runs without drafts, to know how long it takes
_NEW: Final = 0.1  # weight of a new step in an average
_ODD: Final = 4.0  # a step longer than this many times the average is cut to it: disturbed


class DraftGain:
    """The credit of one engine's draft model. Call `begin`, `drafted` and `end` in every step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._credit = ALLOWANCE_S
        self._plain: dict[int, float] = {}  # sequences → seconds of a decode without drafts
        self._row_s = 0.0  # by which one draft lengthens a step
        self._num_since_plain = 0
        self._num_sequences = 0
        self._began = self._drafted = 0.0

    def begin(self, num_sequences: int) -> bool:
        """Begin a step in which so many sequences decode; return whether drafts may be made."""
        self._began = self._drafted = self._clock()
        self._num_sequences = num_sequences
        return (
            self._credit > 0
            and num_sequences in self._plain
            and self._num_since_plain < _PLAIN_EVERY
        )

    def drafted(self) -> None:
        """Note that the drafts are made; the step itself begins."""
        self._drafted = self._clock()

    def end(self, num_drafts: int, num_others: int, num_accepted: int, *, is_decode: bool) -> None:
        """End a step.

        Args:
            num_drafts: draft tokens of the model that the step computed.
            num_others: draft tokens of other origin.
            num_accepted: how many of `num_drafts` were accepted.
            is_decode: did the step compute decodes alone?
        """
        draft_s = self._drafted - self._began
        step_s = self._clock() - self._drafted
        plain_s = self._plain.get(self._num_sequences)
        if is_decode and not num_drafts and not draft_s:
            self._note_plain(plain_s, step_s - num_others * self._row_s)
        self._num_since_plain = self._num_since_plain + 1 if is_decode and num_drafts else 0
        self._credit += _TRIES * (draft_s + step_s) - draft_s
        if plain_s is not None and num_drafts:
            if is_decode:
                longer_s = min(step_s - plain_s, _ODD * plain_s)
                self._row_s += _NEW * (longer_s / (num_drafts + num_others) - self._row_s)
            self._credit += num_accepted * plain_s / self._num_sequences - num_drafts * self._row_s
        self._credit = min(_MOST_S, max(-_MOST_S, self._credit))

    def _note_plain(self, usual: float | None, seconds: float) -> None:
        if usual is not None:
            seconds = usual + _NEW * (min(seconds, _ODD * usual) - usual)
        self._plain[self._num_sequences] = seconds
