"""Matcher of regular expressions, EBNF grammars and structural tags, by xgrammar.

xgrammar's own search for the text that must follow has no limit: a grammar of 600 bytes can force
2^40 characters. Here the text is walked byte by byte, as far as a draft reaches. The tokens of the
draft are those of the model's own tokenizer; the model may cut the text in another way.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from tokenmill_worker.engine.sampling.grammar.bitmasks import allowed_ids, num_places, open_masks
from tokenmill_worker.engine.sampling.grammar.words import MAX_FORCED, Words

_TOKEN_BYTES: Final = 8  # of a forced text, for each token of a draft
_MAX_PLACES: Final = 256  # of a mask; where one text must follow, its beginnings alone are allowed


class TextMatcher:
    """State of one sequence in the grammar."""

    def __init__(self, matcher: Any, words: Words, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = words
        self._mask = open_masks(1, vocab_size)
        self.stop_token_ids = [int(i) for i in matcher.stop_token_ids]

    def is_terminated(self) -> bool:
        """Return whether only the end may follow."""
        return bool(self._matcher.is_terminated())

    def accept_token(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def forced_tokens(self, most: int = MAX_FORCED) -> list[int]:
        """Return the first tokens of the text that must follow. Empty where several texts may
        follow.
        """
        text = b""
        try:
            while len(text) < most * _TOKEN_BYTES and (byte := self._forced_byte()):
                if not self._matcher.accept_string(byte):  # of a token that is no text
                    break
                text += byte
        finally:
            if text:
                self._matcher.rollback(len(text))
        return self._words(text)[:most] if text else []

    def fill_next_token_bitmask(self, words: Tensor, row: int) -> None:
        self._matcher.fill_next_token_bitmask(words, row)

    def _forced_byte(self) -> bytes:
        """Return the byte with which every token that may follow begins; b"": there is none."""
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        if num_places(self._mask[0]) > _MAX_PLACES:
            return b""
        ids = allowed_ids(self._mask[0])
        found = {self._words.tokens[i][:1] for i in ids}
        return found.pop() if len(found) == 1 and self._words.special.isdisjoint(ids) else b""
