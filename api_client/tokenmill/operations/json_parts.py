"""Reads a JSON document while it grows, and gives each of its parts as soon as the part is closed.

A part is a member of the top-level object, or an element of an array that is inside no other array.
A document that is neither object nor array is one part. Numbers and words have no closing
character: the next character closes them, or the end of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

_SPACE: Final = " \t\n\r"
_SCALAR_END: Final = re.compile(r"[ \t\n\r,:\[\]{}\"]")
_STRING_MARK: Final = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class JsonPart:
    """A closed part of a document. `pointer` is its JSON pointer (RFC 6901)."""

    pointer: str
    value: Any


def json_parts(texts: Iterable[str]) -> Iterator[JsonPart]:
    """Yield the parts of a JSON document, each as soon as it is closed.

    Args:
        texts: the document in pieces, such as the texts of chunks; cut anywhere.

    Yields:
        Parts in the order in which they close: an array's elements come before the array. Parts
        that a cut document leaves open are left out.

    Raises:
        ValueError: if the text begins no JSON document.
    """
    document = _Document()
    for text in texts:
        yield from document.push(text)
    yield from document.close()


async def json_parts_async(texts: AsyncIterable[str]) -> AsyncIterator[JsonPart]:
    """Yield what `json_parts` yields, from an asynchronous source."""
    document = _Document()
    async for text in texts:
        for part in document.push(text):
            yield part
    for part in document.close():
        yield part


@dataclass(slots=True)
class _Container:
    """An object or array that is open, and where the value that is being read stands in it."""

    is_object: bool
    is_inside_array: bool
    start: int  # its place in the text
    pointer: str
    key: str = ""
    index: int = 0

    @property
    def next_pointer(self) -> str:
        name = self.key.replace("~", "~0").replace("/", "~1") if self.is_object else self.index
        return f"{self.pointer}/{name}"


class _Expected(Enum):
    VALUE = "a value"
    ELEMENT = "a value, or the end of the array"
    KEY = "a key"
    MEMBER = "a key, or the end of the object"
    COLON = "a colon"
    COMMA = "a comma, or the end of the container"
    NOTHING = "nothing more"
    SCALAR_END = "the end of a number or word"
    KEY_END = "the end of a key"
    STRING_END = "the end of a string"


class _Document:
    def __init__(self) -> None:
        self._text = ""
        self._place = 0  # the next character to read
        self._start = 0  # of the scalar or key that is open
        self._open: list[_Container] = []
        self._expected = _Expected.VALUE
        self._closed: list[JsonPart] = []

    def push(self, text: str) -> list[JsonPart]:
        self._text += text
        while self._place < len(self._text) and self._step():
            pass
        return self._taken()

    def close(self) -> list[JsonPart]:
        if self._expected is _Expected.SCALAR_END and not self._open:
            self._end_value(self._start, len(self._text))
        return self._taken()

    def _taken(self) -> list[JsonPart]:
        closed, self._closed = self._closed, []
        return closed

    # ── steps: each returns whether the next may follow ──

    def _step(self) -> bool:
        if self._expected is _Expected.SCALAR_END:
            return self._scalar()
        if self._expected in (_Expected.STRING_END, _Expected.KEY_END):
            return self._string()
        letter = self._text[self._place]
        if letter not in _SPACE and not self._take(letter):
            raise ValueError(
                f"the text is no JSON: {letter!r} at {self._place} where {self._expected.value} "
                "is due"
            )
        self._place += 1
        return True

    def _take(self, letter: str) -> bool:
        """Read a character that is no part of a scalar, or begins one; return whether it may stand
        here.
        """
        expected = self._expected
        if letter in "]}":
            return self._end_container(letter)
        if expected in (_Expected.VALUE, _Expected.ELEMENT):
            return self._begin_value(letter)
        if expected in (_Expected.KEY, _Expected.MEMBER) and letter == '"':
            self._start, self._expected = self._place, _Expected.KEY_END
            return True
        if expected is _Expected.COLON and letter == ":":
            self._expected = _Expected.VALUE
            return True
        if expected is _Expected.COMMA and letter == ",":
            is_object = self._open[-1].is_object
            self._open[-1].index += 1
            self._expected = _Expected.KEY if is_object else _Expected.VALUE
            return True
        return False

    def _begin_value(self, letter: str) -> bool:
        if letter in ",:":
            return False
        if letter in "[{":
            above = self._open[-1] if self._open else None
            self._open.append(
                _Container(
                    letter == "{",
                    above is not None and (above.is_inside_array or not above.is_object),
                    self._place,
                    "" if above is None else above.next_pointer,
                )
            )
            self._expected = _Expected.MEMBER if letter == "{" else _Expected.ELEMENT
            return True
        self._start = self._place
        self._expected = _Expected.STRING_END if letter == '"' else _Expected.SCALAR_END
        return True

    def _end_container(self, letter: str) -> bool:
        ends = (_Expected.COMMA, _Expected.MEMBER if letter == "}" else _Expected.ELEMENT)
        if self._expected not in ends or self._open[-1].is_object != (letter == "}"):
            return False
        ended = self._open.pop()
        if self._open:
            self._end_value(ended.start, self._place + 1)
        else:
            self._expected = _Expected.NOTHING
        return True

    def _scalar(self) -> bool:
        end = _SCALAR_END.search(self._text, self._place)
        self._place = end.start() if end else len(self._text)
        if end is not None:
            self._end_value(self._start, self._place)
        return end is not None

    def _string(self) -> bool:
        while mark := _STRING_MARK.search(self._text, self._place):
            if mark[0] == '"':
                self._place = mark.end()
                self._end_string()
                return True
            if mark.end() == len(self._text):
                self._place = mark.start()  # what it escapes is not there yet
                return False
            self._place = mark.end() + 1
        self._place = len(self._text)
        return False

    def _end_string(self) -> None:
        if self._expected is _Expected.KEY_END:
            self._open[-1].key = _value(self._text[self._start : self._place])
            self._expected = _Expected.COLON
        else:
            self._end_value(self._start, self._place)

    def _end_value(self, start: int, end: int) -> None:
        """Note the value that ended, if it is a part."""
        self._expected = _Expected.COMMA if self._open else _Expected.NOTHING
        parent = self._open[-1] if self._open else None
        if parent is None:
            self._closed.append(JsonPart("", _value(self._text[start:end])))
        elif len(self._open) == 1 or not (parent.is_object or parent.is_inside_array):
            self._closed.append(JsonPart(parent.next_pointer, _value(self._text[start:end])))


def _value(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> Any:
    raise ValueError(f"the text is no JSON: {word!r} is no value")
