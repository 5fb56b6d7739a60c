"""Builds the text of one choice's thoughts from its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenmill_worker.text.chat.reasoning import Parser, Part
from tokenmill_worker.text.token_pieces import Detokenizer


class ThoughtText:
    """Sorts the tokens of one choice, and keeps the text of its thoughts.

    The line breaks that a model writes after a mark separate the thoughts from the marks and from
    the answer, so they are left out. `num_tokens` counts the tokens of thoughts and their marks.
    """

    __slots__ = ("_after_mark", "_detokenizer", "_new", "_parser", "_was_thought", "num_tokens")

    def __init__(self, parser: Parser, detokenizer: Callable[[], Detokenizer]) -> None:
        self._parser = parser
        self._new = detokenizer
        self._detokenizer = detokenizer()
        self._after_mark = True
        self._was_thought = False
        self.num_tokens = 0

    def push(self, token_id: int) -> str | None:
        """Return the text of a token of thoughts, "" for a mark; None for a token of the answer."""
        part = self._parser.push(token_id)
        if part is Part.TEXT:
            if not self.num_tokens:
                self._after_mark = False  # there was no mark: the answer's own line breaks count
            return None
        self.num_tokens += 1
        if part is Part.THOUGHT:
            self._was_thought = True
            return self.without_gap(self._detokenizer.push(token_id))
        text = self.flush()
        if self._was_thought:
            self._detokenizer = self._new()
        self._after_mark, self._was_thought = True, False
        return text

    @property
    def call_head(self) -> Sequence[int]:
        """The tokens of a head that begins a tool call, if its last token was just read."""
        return self._parser.call_head

    def without_gap(self, text: str) -> str:
        """Return the text without the line breaks that follow a mark."""
        if self._after_mark and text:
            text = text.lstrip("\r\n")
            self._after_mark = not text
        return text

    def flush(self) -> str:
        """Return the text that was held back when the answer ended within thoughts."""
        return self.without_gap(self._detokenizer.flush()) if self._was_thought else ""
