"""Draft tokens of a sequence: those that its grammar forces, else a draft model's, else those of
prompt lookup.

Forced tokens need no guess: where a grammar leaves one text, they are that text as the tokenizer
cuts it. Where it leaves one token, that token is certain. The model draws all other tokens itself,
so an answer is what it would have been without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tokenmill_worker.engines.own.plan import NO_DRAFT, Draft
from tokenmill_worker.engines.own.sampling.prompt_lookup import PromptLookup
from tokenmill_worker.engines.own.sequence import Sequence


class Drafts:
    """Proposes drafts for the scheduler: `forced_tokens` gives those of a grammar, `guesses` has
    those of a draft model for the step that is planned.
    """

    def __init__(
        self,
        forced_tokens: Callable[[Sequence], Draft],
        lookup: PromptLookup | None,
        guesses: Mapping[Sequence, tuple[int, ...]],
    ) -> None:
        self._forced_tokens = forced_tokens
        self._lookup = lookup
        self._guesses = guesses

    def __call__(self, sequence: Sequence) -> Draft:
        """Return tokens that may follow those of the sequence that the host has."""
        if sequence.is_constrained and (forced := self._forced_tokens(sequence)).token_ids:
            return forced
        if guess := self._guesses.get(sequence):
            return Draft(guess)
        return NO_DRAFT if self._lookup is None else Draft(self._lookup(sequence))

    def release(self, sequence: Sequence) -> None:
        if self._lookup is not None:
            self._lookup.release(sequence)
