"""Matcher of regular expressions, EBNF grammars and structural tags, by xgrammar.

xgrammar gives a text that must follow, not its tokens. The tokens are those of the model's own
tokenizer; the model may cut the text in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class TextMatcher:
    """State of one sequence in the grammar; `tokens_of` returns the tokens of a text."""

    def __init__(self, matcher: Any, tokens_of: Callable[[str], list[int]]) -> None:
        self._matcher = matcher
        self._tokens_of = tokens_of
        self.stop_token_ids = [int(i) for i in matcher.stop_token_ids]

    def is_terminated(self) -> bool:
        """Return whether only the end may follow."""
        return bool(self._matcher.is_terminated())

    def accept_token(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def forced_tokens(self) -> list[int]:
        """Return tokens of the text that must follow. Empty where several texts may follow."""
        text = self._matcher.find_jump_forward_string()
        return self._tokens_of(text) if text else []

    def fill_next_token_bitmask(self, words: Tensor, row: int) -> None:
        self._matcher.fill_next_token_bitmask(words, row)
