"""Limits the drafts of one sequence by how many of its last ones were accepted.

A fully accepted draft doubles the next one. Failures first shorten the next draft, then pause
drafting for longer and longer, until drafts are accepted again. The result of a draft is read from
the sequence's tokens. Plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

_FIRST: Final = 4
_LONGEST_PAUSE: Final = 256


@dataclass(slots=True)
class AcceptanceLimit:
    """Call `learn` with a sequence's tokens before each draft, and `note` with the draft."""

    max_tokens: int
    num_next: int = _FIRST  # tokens of the next draft
    _pause: int = 1  # tokens without a draft after the next failure
    _quiet_until: int = 0  # length of the sequence before which nothing is drafted
    _draft: tuple[int, ...] = ()
    _drafted_at: int = 0  # length of the sequence when the draft was made

    def learn(self, token_ids: Seq[int]) -> int:
        """Compare the last draft with the tokens that came; return how many of it were accepted.

        It waits until all tokens of the draft, or one that differs, have come.
        """
        draft = self._draft
        came = tuple(token_ids[self._drafted_at : self._drafted_at + len(draft)])
        if not draft or (len(came) < len(draft) and came == draft[: len(came)]):
            return 0
        self._draft = ()
        accepted = next(
            (i for i, (a, b) in enumerate(zip(draft, came, strict=False)) if a != b), len(came)
        )
        if accepted == len(draft):
            self.num_next, self._pause = min(self.max_tokens, 2 * self.num_next), 1
        elif 2 * accepted >= len(draft):
            self._pause = 1
        elif accepted:
            self.num_next = accepted
        else:
            self.num_next = max(1, self.num_next // 2)
            self._quiet_until = len(token_ids) + self._pause
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        return accepted

    def allowed(self, length: int) -> int:
        """Return how many tokens may be drafted now, at this length; 0 during a pause."""
        return 0 if length < self._quiet_until else min(self.num_next, self.max_tokens)

    def note(self, draft: tuple[int, ...], length: int) -> None:
        """Remember the draft that follows the sequence's `length` tokens, unless the result of an
        earlier one is still to come.
        """
        if not self._draft:
            self._draft, self._drafted_at = draft, length
