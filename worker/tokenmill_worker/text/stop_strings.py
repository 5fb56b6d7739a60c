"""Finds stop strings in text that arrives piece by piece.

The answer ends at the stop string that is complete first, wherever the pieces were cut; if several
are complete at the same character, the longest counts. Only text that may be the beginning of a
stop string is held back. The text is read once, by the automaton of Knuth, Morris and Pratt for
each stop string. Tokens do not appear here.
"""

from collections.abc import Iterable


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
        """Are there no stop strings?"""
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
