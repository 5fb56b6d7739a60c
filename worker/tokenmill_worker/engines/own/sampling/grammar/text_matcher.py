"""Matcher of regular expressions, EBNF grammars and structural tags, by xgrammar.

xgrammar's own search for the text that must follow has no limit: a grammar of 600 bytes can force
2^40 characters. Here the text is walked byte by byte, as far as a draft reaches and a limit of time
allows: the step waits for it. The tokens of the draft are those of the model's own tokenizer; the
model may cut the text in another way.
"""

from __future__ import annotations

import time
from typing import Any, Final

from torch import Tensor

from tokenmill_worker.engines.own.sampling.grammar.bitmasks import (
    each_allowed,
    num_places,
    open_masks,
)
from tokenmill_worker.engines.own.sampling.grammar.words import MAX_FORCED, Words

WALK_LIMIT_S: Final = 0.004  # CPU seconds of one walk; a draft of plain text takes about half
_TOKEN_BYTES: Final = 8  # of a forced text, for each token of a draft
_MAX_PLACES: Final = 256  # of a mask; where one text must follow, its beginnings alone are allowed


class TextMatcher:
    """State of one sequence in the grammar."""

    def __init__(self, matcher: Any, words: Words, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = words
        self._mask = open_masks(1, vocab_size)
        self._is_mask_current = False  # whether it is that of the next token
        self.stop_token_ids = [int(i) for i in matcher.stop_token_ids]

    def is_terminated(self) -> bool:
        """Return whether only the end may follow."""
        return bool(self._matcher.is_terminated())

    def accept_token(self, token_id: int) -> bool:
        self._is_mask_current = False
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._is_mask_current = False
        self._matcher.rollback(num_tokens)

    def forced_tokens(self, most: int = MAX_FORCED) -> list[int]:
        """Return the first tokens of the text that must follow. Empty where several texts may
        follow.
        """
        text, end_s = b"", time.thread_time() + WALK_LIMIT_S
        try:
            while len(text) < most * _TOKEN_BYTES and (byte := self._forced_byte()):
                if not self._matcher.accept_string(byte):  # of a token that is no text
                    break
                text += byte
                if time.thread_time() >= end_s:
                    break
        finally:
            if text:
                self._is_mask_current = False
                self._matcher.rollback(len(text))
        return self._words(text)[:most] if text else []

    def fill_next_token_bitmask(self, words: Tensor, row: int) -> None:
        """Write the mask of the next token to `words[row]`: the one that a search for forced tokens
        has left, or else a new one.
        """
        if self._is_mask_current:
            words[row].copy_(self._mask[0])
        else:
            self._matcher.fill_next_token_bitmask(words, row)

    def _forced_byte(self) -> bytes:
        """Return the byte with which every token that may follow begins; b"": there is none."""
        self._is_mask_current = False
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        self._is_mask_current = True
        if num_places(self._mask[0]) > _MAX_PLACES:
            return b""
        found: bytes | None = None
        for token_id in each_allowed(self._mask[0]):
            byte = self._words.tokens[token_id][:1]
            if token_id in self._words.special or found not in (None, byte):
                return b""  # most masks show it by their first tokens
            found = byte
        return found or b""
