"""Reads arguments that are written one by one, and writes them as the JSON object that they mean.

The grammar admits no other text. Cut anywhere, the text gives the same pieces together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

from tokenmill_schemas.generation import CallGrammar
from tokenmill_worker.contract.named_arguments import named_arguments

_CLOSING: Final = "]}"


class JsonScanner:
    """Follows JSON text letter by letter: its depth of brackets, and whether it is in a string."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string, self._is_escaped = False, False

    @property
    def is_outside(self) -> bool:
        """Return whether the next letter is outside of every bracket and string."""
        return not self.depth and not self._in_string

    def take(self, letter: str) -> None:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif letter == "\\":
                self._is_escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self.depth += 1
        elif letter in _CLOSING:
            self.depth -= 1

    def end_of_object(self, text: str) -> int:
        """Return the place behind the object's last bracket, or the text's end."""
        for place, letter in enumerate(text):
            self.take(letter)
            if letter in _CLOSING and self.is_outside:
                return place + 1
        return len(text)

    def end_of_value(self, text: str, stops: str) -> int:
        """Return the place of the first stop behind the value, or the text's end."""
        for place, letter in enumerate(text):
            if letter in stops and self.is_outside:
                return place
            self.take(letter)
        return len(text)


class ArgumentReader:
    """Reads the arguments of one call after the other.

    Args:
        grammar: of the answer; its calls have a form of arguments.
        letters: those of each mark, which is one character of the text.
    """

    def __init__(self, grammar: CallGrammar, letters: Mapping[int, str]) -> None:
        assert grammar.arguments is not None
        self._letters = letters
        self._json_letters = {
            code: json.dumps(mark, ensure_ascii=False)[1:-1] for code, mark in letters.items()
        }
        self._form, self._call_end = grammar.arguments, grammar.end
        self._stops = self._form.end[:1] or self._form.separator[0] + self._call_end[0]
        self._words = {word: value for value, word in self._form.words.items()}
        self._schemas = {tool.name: tool.schema for tool in grammar.tools}
        self.begin("")

    def begin(self, name: str) -> None:
        """Begin the arguments of a call of this tool."""
        self._plain = frozenset[str]()
        if self._form.has_plain_texts and name in self._schemas:
            arguments = named_arguments(self._schemas[name])  # the grammar has checked the schema
            self._plain = frozenset(one.name for one in arguments if one.is_text)
        self._count = 0
        self._held = ""
        self._pieces = ["{"]
        self._is_over = False
        self._step: Callable[[], bool] = self._argument

    def read(self, text: str) -> tuple[str, str, bool]:
        """Read on. Returns the piece of the object that is certain, the text that is not taken
        yet, and whether the object is complete; the end of the call is not taken.
        """
        self._held = text
        while self._held and not self._is_over and self._step():
            pass
        piece = "".join(self._pieces)
        self._pieces.clear()
        return piece, self._held, self._is_over

    # ── steps: each returns whether the next may follow ──

    def _argument(self) -> bool:
        if self._held.startswith(self._call_end):
            self._pieces.append("}")
            self._is_over = True
            return False
        start = len(self._form.before) + (len(self._form.separator) if self._count else 0)
        if self._call_end.startswith(self._held) or len(self._held) < start:
            return False
        self._held = self._held[start:]
        self._step = self._name
        return True

    def _name(self) -> bool:
        after = self._form.after
        end = self._held.find(after[0])
        if end < 0 or len(self._held) < end + len(after):
            return False
        name = self._held[:end].translate(self._letters)
        self._held = self._held[end + len(after) :]
        self._pieces.append((", " if self._count else "") + json.dumps(name) + ": ")
        self._count += 1
        self._scanner = JsonScanner()
        if name in self._plain:
            self._pieces.append('"')
            self._step = self._plain_text
        else:
            self._step = self._word if self._words else self._value
        return True

    def _plain_text(self) -> bool:
        end = self._held.find(self._form.end)
        cut = end if end >= 0 else len(self._held) - overlap(self._held, self._form.end)
        text = self._held[:cut].translate(self._letters)
        self._pieces.append(json.dumps(text, ensure_ascii=False)[1:-1])
        self._held = self._held[cut:]
        if end < 0:
            return False
        self._pieces.append('"')
        return self._end_value()

    def _word(self) -> bool:
        """Read a word that stands for a value of JSON; another value is read letter by letter."""
        if not any(word[0] == self._held[0] for word in self._words):
            self._step = self._value
            return True
        end = JsonScanner().end_of_value(self._held, self._stops)
        if end == len(self._held):
            return False
        self._pieces.append(self._words[self._held[:end]])
        self._held = self._held[end:]
        return self._end_value()

    def _value(self) -> bool:
        end = self._scanner.end_of_value(self._held, self._stops)
        is_over = end < len(self._held)
        self._pieces.append(self._held[:end].translate(self._json_letters))
        self._held = self._held[end:]
        return is_over and self._end_value()

    def _end_value(self) -> bool:
        """Skip the text behind a value, once all of it is there."""
        self._step = self._end_value
        if len(self._held) < len(self._form.end):
            return False
        self._held = self._held[len(self._form.end) :]
        self._step = self._argument
        return True


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of the text that begins the mark."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if mark.startswith(text[-n:])), 0)
