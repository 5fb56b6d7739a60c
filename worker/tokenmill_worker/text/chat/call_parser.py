"""Reads tool calls from a growing answer, by the description that its grammar is made of.

The grammar admits no other text, so the fixed parts are skipped by their length. Cut anywhere, the
text gives the same pieces together.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tokenmill_schemas.generation import CallGrammar
from tokenmill_schemas.result import GeneratedCall, ToolCallDelta
from tokenmill_worker.text.chat.argument_reader import ArgumentReader, JsonScanner, overlap


@dataclass(slots=True)
class _OpenCall:
    id: str
    name: str
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False


class CallParser:
    """Splits the text of one choice into free text and calls."""

    def __init__(self, grammar: CallGrammar, id_of: Callable[[int], str]) -> None:
        # A mark is one character that no decoded text has: its letters alone are text.
        # No such character leaves the parser: free text is without the marks, as all special tokens
        # have no text there; within a call, where they are not due, they are their letters.
        codes = {mark: chr(0xDC80 + place) for place, mark in enumerate(sorted(grammar.marks))}
        self._nothing_for = {ord(code): None for code in codes.values()}
        letters = {ord(code): mark for mark, code in codes.items()}
        self._grammar = _coded(grammar, codes)
        self._id_of = id_of
        self._calls: list[_OpenCall] = []
        self._held = ""  # text that no step has taken yet
        self._to_skip = 0  # characters of fixed text
        self._step: Callable[[], bool] = self._free_text
        self._text: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._scanner = JsonScanner()
        self._letters = letters
        self._json_letters = {
            code: json.dumps(mark, ensure_ascii=False)[1:-1] for code, mark in letters.items()
        }
        self._arguments = (
            None if grammar.arguments is None else ArgumentReader(self._grammar, letters)
        )
        # the token of a mark → its character
        self.marks = {token_id: codes[mark] for mark, token_id in grammar.marks.items()}

    @property
    def calls(self) -> tuple[GeneratedCall, ...]:
        return tuple(
            GeneratedCall(call.id, call.name, "".join(call.pieces), call.is_complete)
            for call in self._calls
        )

    @property
    def has_only_complete_calls(self) -> bool:
        """Return whether there are calls, and each of them is complete."""
        return bool(self._calls) and all(call.is_complete for call in self._calls)

    def push(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Return the free text and the pieces of calls that this text makes certain."""
        self._held += text
        while self._skipped() and self._held and self._step():
            pass
        found = "".join(self._text).translate(self._nothing_for), tuple(self._deltas)
        self._text.clear()
        self._deltas.clear()
        return found

    def close(self, text: str) -> str:
        """Return the free text that was held back, after the answer's last text. A call that is not
        complete stays as it is.
        """
        if self._step not in (self._free_text, self._only_text) or self._to_skip:
            return ""
        held, self._held = self._held, ""
        return (held + text).translate(self._nothing_for)

    # ── steps: each returns whether the next may follow ──

    def _skipped(self) -> bool:
        """Skip fixed text; return whether none is left to skip."""
        count = min(self._to_skip, len(self._held))
        self._held = self._held[count:]
        self._to_skip -= count
        return not self._to_skip

    def _free_text(self) -> bool:
        trigger = self._grammar.trigger
        if self._grammar.at_start and not trigger.startswith(self._held[: len(trigger)]):
            self._step = self._only_text
            return True
        place = self._held.find(trigger)
        if place >= 0:
            self._text.append(self._held[:place])
            self._held = self._held[place:]
            self._to_skip = len(trigger) + len(self._grammar.before)
            self._step = self._name
            return True
        keep = overlap(self._held, trigger)
        cut = len(self._held) - keep
        self._text.append(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _only_text(self) -> bool:
        """Pass on the text of an answer that calls nothing."""
        self._text.append(self._held)
        self._held = ""
        return False

    def _name(self) -> bool:
        end = self._held.find(self._grammar.after[0])
        if end < 0:
            return False
        index = len(self._calls)
        call = _OpenCall(self._id_of(index), self._held[:end].translate(self._letters))
        self._calls.append(call)
        self._deltas.append(ToolCallDelta(index, call.id, call.name))
        self._held = self._held[end:]
        self._to_skip = len(self._grammar.after)
        self._scanner = JsonScanner()
        if self._arguments is not None:
            self._arguments.begin(call.name)
        self._step = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        call = self._calls[-1]
        if self._arguments is None:
            end = self._scanner.end_of_object(self._held)
            piece, self._held = self._held[:end], self._held[end:]
            piece = piece.translate(self._json_letters)
            is_over = self._scanner.is_outside
        else:
            piece, self._held, is_over = self._arguments.read(self._held)
        if piece:
            call.pieces.append(piece)
            self._deltas.append(ToolCallDelta(len(self._calls) - 1, arguments=piece))
        if not is_over:
            return False
        call.is_complete = True
        self._to_skip = len(self._grammar.end)
        self._step = self._between
        return True

    def _between(self) -> bool:
        grammar = self._grammar
        if grammar.closing and self._held[0] == grammar.closing[0] and self._is_closing():
            if len(self._held) < len(grammar.closing) and grammar.closing.startswith(self._held):
                return False
            self._step = self._nothing
            return True
        if grammar.separator is None:
            self._step = self._nothing
            return True
        self._to_skip = len(grammar.separator) + len(grammar.before)
        self._step = self._name
        return True

    def _is_closing(self) -> bool:
        """Return whether the text goes on with the closing text, as far as it is there."""
        closing = self._grammar.closing
        return closing.startswith(self._held[: len(closing)])

    def _nothing(self) -> bool:
        self._held = ""
        return False


def _coded(grammar: CallGrammar, codes: dict[str, str]) -> CallGrammar:
    """Return the grammar with each mark in its texts replaced by its character."""

    def coded(text: str) -> str:
        for mark in sorted(codes, key=len, reverse=True):
            text = text.replace(mark, codes[mark])
        return text

    return msgspec.structs.replace(
        grammar,
        trigger=coded(grammar.trigger),
        before=coded(grammar.before),
        after=coded(grammar.after),
        end=coded(grammar.end),
        separator=None if grammar.separator is None else coded(grammar.separator),
        closing=coded(grammar.closing),
    )
