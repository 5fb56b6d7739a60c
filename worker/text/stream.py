"""The text of one choice as its tokens come: detokenised, cut at the first stop string, kept per token.

Feeding the same tokens to a fresh stream gives the same state; that is all that resuming needs. It
knows no chunks and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from worker.text.detokenizer import Detokenizer
from worker.text.stops import StopFinder


class TextStream:
    """`min_tokens`: stop strings are not looked for before the answer has as many tokens.

    `token_ids` is what is delivered and billed: up to the token that completed a stop string. `pieces`
    has the text that each of them made certain; `rest` is text after the last token's piece, which only
    an answer that was broken off has. `stopped`: a stop string was found, so the text is complete and further tokens
    are nothing to it; `has_stops`: one may be found.
    """

    __slots__ = (
        "_detokenizer", "_is_closed", "_min_tokens", "_stops", "has_stops", "pieces", "rest", "stopped", "token_ids",
    )  # fmt: skip

    def __init__(self, detokenizer: Detokenizer, stop: Iterable[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = StopFinder(stop)
        self.has_stops = not self._stops.is_idle
        self._min_tokens = min_tokens
        self._is_closed = False
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.rest = ""
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self.pieces) + self.rest

    @property
    def text_ends(self) -> tuple[int, ...]:
        """The length of the text after each token's piece."""
        return tuple(accumulate(map(len, self.pieces)))

    def push(self, token_id: int) -> str:
        """The text that this token makes certain. Ignored once stopped or closed."""
        if self.stopped or self._is_closed:
            return ""
        self.token_ids.append(token_id)
        text = self._detokenizer.push(token_id)
        if self.has_stops and len(self.token_ids) >= self._min_tokens:
            text = self._look_for_stops(text)
        self.pieces.append(text)
        return text

    def close(self, *, with_last_token: bool = True) -> str:
        """No token comes any more: the text that was held back. It may complete a stop string.

        It belongs to the last token where that token ended the answer; where the answer was broken off
        (cancelled, expired) the last token may be told already, and the text becomes the rest.
        """
        if self._is_closed or self.stopped:
            self._is_closed = True
            return ""
        self._is_closed = True
        text = self._look_for_stops(self._detokenizer.flush())
        if not self.stopped:
            text += self._stops.flush()
        if with_last_token and self.pieces:
            self.pieces[-1] += text
        else:
            self.rest = text
        return text

    def _look_for_stops(self, text: str) -> str:
        certain = self._stops.push(text)
        self.stopped = self._stops.stopped
        return certain

    def replay(self, token_ids: Iterable[int]) -> None:
        """Catch up with tokens that an earlier attempt delivered."""
        for token_id in token_ids:
            self.push(token_id)
