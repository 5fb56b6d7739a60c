"""Draft tokens of a sequence: those that its grammar forces, else those of prompt lookup.

Forced tokens need no guess: where a grammar leaves one way, they are its text as the tokenizer cuts
it. The model draws each of them all the same, so an answer is what it would have been without
drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tokenmill_worker.engine.sampling.prompt_lookup import PromptLookup
from tokenmill_worker.engine.sequence import Sequence

MAX_FORCED: Final = 16  # forced tokens in one step


def most_forced(is_asynchronous: bool) -> int:
    """Return how many forced tokens a step of a device appends to a sequence at most.

    It is none where steps are launched ahead: drafts follow tokens that the host knows.
    """
    return 0 if is_asynchronous else MAX_FORCED


class Drafts:
    """Proposes drafts for the scheduler: `forced_tokens` gives those of a grammar, of which at most
    `max_forced` are used.
    """

    def __init__(
        self,
        max_forced: int,
        forced_tokens: Callable[[Sequence], tuple[int, ...]],
        lookup: PromptLookup | None,
    ) -> None:
        self._max_forced = max_forced
        self._forced_tokens = forced_tokens
        self._lookup = lookup

    def __call__(self, sequence: Sequence) -> tuple[int, ...]:
        """Return draft tokens of a sequence whose tokens are all on the host; () for none."""
        if self._max_forced and (forced := self._forced_tokens(sequence)):
            return forced[: self._max_forced]
        return () if self._lookup is None else self._lookup(sequence)

    def release(self, sequence: Sequence) -> None:
        if self._lookup is not None:
            self._lookup.release(sequence)
