"""Builds the text of one choice from its tokens: detokenised, cut at the first stop string, kept
per token.

A new stream that gets the same tokens reaches the same state, which is all that resuming needs.
Chunks and the engine do not appear here.

The answer ends at the stop string that is complete first, wherever the pieces were cut; if several
are complete at the same character, the longest counts. Only text that may be the beginning of a
stop string is held back. The text is read once, by the automaton of Knuth, Morris and Pratt for
each stop string.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from tokenmill_schemas.result import GeneratedCall, ToolCallDelta
from tokenmill_worker.text.chat.call_parser import CallParser
from tokenmill_worker.text.chat.thought_text import ThoughtText
from tokenmill_worker.text.token_pieces import Detokenizer


class _Matcher:
    """Tracks how many characters of one stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of `stop`, always fewer than all
        self._fallback = _borders(stop)

    def scan(self, text: str) -> int | None:
        """Return the end, in `text`, of the first occurrence that is complete in it; None without
        one, and the partial match is remembered.
        """
        stop, matched = self.stop, self.matched
        position, length = 0, len(text)
        while position < length:
            if matched == 0:
                position = text.find(stop[0], position)
                if position < 0:
                    break
            letter = text[position]
            while matched and stop[matched] != letter:
                matched = self._fallback[matched - 1]
            if stop[matched] == letter:
                matched += 1
            position += 1
            if matched == len(stop):
                return position
        self.matched = matched
        return None


def _borders(stop: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = borders[length - 1]
        if stop[length] == stop[i]:
            length += 1
        borders[i] = length
    return borders


class StopFinder:
    """Passes text through, up to the first stop string."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""
        self.stopped = False

    @property
    def is_idle(self) -> bool:
        """Return whether there are no stop strings."""
        return not self._matchers

    def push(self, text: str) -> str:
        """Return the text that is certain now. After a stop string was found, the text is always
        empty.
        """
        if self.stopped or not text:
            return ""
        if not self._matchers:
            return text
        ends = [(end, -len(m.stop)) for m in self._matchers if (end := m.scan(text)) is not None]
        buffered = self._held + text
        if ends:
            self.stopped = True
            end, minus_length = min(ends)
            certain = buffered[: len(self._held) + end + minus_length]
            self._held = ""
            return certain
        keep = len(buffered) - max(m.matched for m in self._matchers)
        self._held = buffered[keep:]
        return buffered[:keep]

    def flush(self) -> str:
        """Return the text that was held back: the text has ended, so it was no stop string."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held


class TextStream:
    """The tokens and the text of one choice.

    `min_tokens`: stop strings count only once the answer has this many tokens. `token_ids` are the
    tokens that are delivered and billed, up to the one that completed a stop string. `pieces` holds
    the text that each of them made certain. `rest` is text after the last token's piece; only an
    answer that was broken off has one. `stopped`: a stop string was found, so the text is complete
    and further tokens are ignored. `has_stops`: there are stop strings to look for.

    `thoughts` sorts out the tokens of the model's thoughts: their text is in `reasoning_pieces` and
    `reasoning_rest`, and stop strings are not looked for in them. None: there are none. `calls`
    sorts out tool calls: `call_pieces` has those of each token. None: the answer calls no tools.
    """

    __slots__ = (
        "_calls", "_detokenizer", "_echo", "_is_closed", "_min_tokens", "_stops", "_thoughts",
        "call_pieces", "has_stops", "pieces", "reasoning_pieces", "reasoning_rest", "rest",
        "stopped", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Iterable[str] = (),
        min_tokens: int = 0,
        thoughts: ThoughtText | None = None,
        calls: CallParser | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopFinder(stop)
        self.has_stops = not self._stops.is_idle
        self._min_tokens = min_tokens
        self._is_closed = False
        self._echo = ""  # text before that of the first token
        self._thoughts = thoughts
        self._calls = calls
        self.call_pieces: list[tuple[ToolCallDelta, ...]] = []
        self.reasoning_pieces: list[str] = []
        self.reasoning_rest = ""
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

    @property
    def is_plain(self) -> bool:
        """Return whether the answer is text alone, without thoughts and calls."""
        return self._thoughts is None and self._calls is None

    @property
    def tool_calls(self) -> tuple[GeneratedCall, ...]:
        return () if self._calls is None else self._calls.calls

    @property
    def has_only_complete_calls(self) -> bool:
        """Return whether there are calls, and each of them is complete."""
        return self._calls is not None and self._calls.has_only_complete_calls

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_pieces) + self.reasoning_rest

    @property
    def reasoning_ends(self) -> tuple[int, ...]:
        """The length of the thoughts after each token, up to the last token of thoughts."""
        ends = tuple(accumulate(map(len, self.reasoning_pieces)))
        return ends[: ends.index(ends[-1]) + 1] if ends and ends[-1] else ()

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._thoughts is None else self._thoughts.num_tokens

    def echo(self, prompt_ids: Iterable[int]) -> tuple[int, ...]:
        """Begin the text with that of a prompt, before any token. Return its length after each
        token of the prompt. What the last one makes not certain yet comes with the first token.
        """
        pieces = [self._detokenizer.push(token_id) for token_id in prompt_ids]
        self._echo = "".join(pieces)
        return tuple(accumulate(map(len, pieces)))

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it makes certain. Ignored once stopped or closed."""
        if self.stopped or self._is_closed:
            return ""
        self.token_ids.append(token_id)
        if self._thoughts is not None:
            thought = self._thoughts.push(token_id)
            self.reasoning_pieces.append(thought or "")
            if thought is not None:
                if self._calls is not None:
                    head = "".join(map(self._token_text, self._thoughts.call_head))
                    self.call_pieces.append(self._calls.push(head)[1])
                self.pieces.append("")
                return ""
        text = self._token_text(token_id)
        if self._thoughts is not None:
            text = self._thoughts.without_gap(text)
        if self._calls is not None:
            text, pieces = self._calls.push(text)
            self.call_pieces.append(pieces)
        if self.has_stops and len(self.token_ids) >= self._min_tokens:
            text = self._look_for_stops(text)
        if self._echo:
            text, self._echo = self._echo + text, ""
        self.pieces.append(text)
        return text

    def _token_text(self, token_id: int) -> str:
        """Return the text that the token makes certain; the marks of calls count as their text."""
        if self._calls is not None and (mark := self._calls.marks.get(token_id)) is not None:
            return mark
        return self._detokenizer.push(token_id)

    def close(self, *, with_last_token: bool = True) -> str:
        """End the stream and return the text that was held back. That text may complete a stop
        string.

        It belongs to the last token if that token ended the answer. If the answer was broken off
        (cancelled, expired), the last token may have been delivered already, and the text becomes
        the rest.
        """
        if self._is_closed or self.stopped:
            self._is_closed = True
            return ""
        self._is_closed = True
        if self._thoughts is not None:
            thought = self._thoughts.flush()
            if with_last_token and self.reasoning_pieces:
                self.reasoning_pieces[-1] += thought
            else:
                self.reasoning_rest = thought
        text = self._detokenizer.flush()
        if self._calls is not None:
            text = self._calls.close(text)
        text = self._look_for_stops(text)
        if not self.stopped:
            text += self._stops.flush()
        text, self._echo = self._echo + text, ""
        if with_last_token and self.pieces:
            self.pieces[-1] += text
        else:
            self.rest = text
        return text

    def _look_for_stops(self, text: str) -> str:
        certain = self._stops.push(text)
        self.stopped = self._stops.stopped
        return certain
