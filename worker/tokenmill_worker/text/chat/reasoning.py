"""Tells a model's thoughts from its answer, by the tokens that its family marks them with.

Two families are known: tags (`<think>` … `</think>`), and the channels of gpt-oss, whose messages
name a channel before their text. A format makes both: the parser that sorts the tokens of an
answer, and the description by which the engine binds a grammar behind the thoughts. A parser that
reads the same tokens again reaches the same state, which is all that resuming needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from tokenmill_worker.contract.requests import Thoughts

TAGS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_CHANNEL_MARKS: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_FINAL: Final = "final"
_THOUGHT_CHANNEL: Final = "analysis"
_CALL_CHANNEL: Final = "commentary to=functions."


class Part(Enum):
    """The part of an answer that a token belongs to. A mark has no text."""

    TEXT = "text"
    THOUGHT = "thought"
    MARK = "mark"


class Parser(Protocol):
    """Sorts the tokens of one choice.

    `call_head`: the tokens of a head that begins a tool call, if its last token was just read.
    """

    call_head: Sequence[int]

    def push(self, token_id: int) -> Part: ...


class ReasoningFormat(Protocol):
    """Describes how one family marks thoughts."""

    def opening(self, chat: str, begun: str = "") -> Opening:
        """Return how the answers to a chat begin.

        Args:
            chat: the rendered chat.
            begun: the text of the assistant's message that ends the chat and is continued.
        """
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """Describes how the answers to one prompt begin. `thoughts`, for the engine, has no budget."""

    thoughts: Thoughts | None  # None: the prompt has ended the thoughts
    parser: Callable[[], Parser]


# ── tags ──


@dataclass(frozen=True, slots=True)
class TagFormat:
    """Thoughts between two tokens, at the beginning of an answer."""

    start: int
    end: int
    start_text: str
    end_text: str

    def opening(self, chat: str, begun: str = "") -> Opening:
        """Read from the end of the prompt whether thoughts are open, are over, or may follow.

        In a message that is continued, the last mark decides. In the rest of the chat only a mark
        at the end does: earlier ones are of other messages.
        """
        begun = begun.strip()
        before, _, _ = chat.rpartition(begun) if begun else (chat, "", "")
        tail = before.rstrip()
        is_open, is_over = tail.endswith(self.start_text), tail.endswith(self.end_text)
        last_start, last_end = begun.rfind(self.start_text), begun.rfind(self.end_text)
        if last_start != last_end:  # both are -1 where there is none
            is_open, is_over = last_start > last_end, last_end > last_start
        thoughts = Thoughts(
            end=(self.end,),
            closing=(self.end,),
            start=None if is_open else self.start,
            is_open=is_open,
        )
        return Opening(
            None if is_over else thoughts,
            lambda: TagParser(self, is_open, not is_open and not is_over),
        )


class TagParser:
    __slots__ = ("_format", "_is_inside", "_may_begin", "call_head")

    def __init__(self, format_: TagFormat, is_inside: bool, may_begin: bool) -> None:
        self._format = format_
        self._is_inside = is_inside
        self._may_begin = may_begin  # with the next token
        self.call_head: Sequence[int] = ()  # calls have no heads of their own

    def push(self, token_id: int) -> Part:
        may_begin, self._may_begin = self._may_begin, False
        if self._is_inside:
            if token_id != self._format.end:
                return Part.THOUGHT
            self._is_inside = False
            return Part.MARK
        if may_begin and token_id == self._format.start:
            self._is_inside = True
            return Part.MARK
        return Part.TEXT


# ── channels ──


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """Messages of gpt-oss: a header names the channel, `message` begins the text, `end` ends it."""

    start: int
    channel: int
    message: int
    end: int
    assistant: tuple[int, ...]
    final: tuple[int, ...]
    decode: Callable[[list[int]], str]

    def opening(self, chat: str, begun: str = "") -> Opening:
        """Read from the last header of the prompt whether a message is open already."""
        header = chat.rpartition("<|start|>")[2]
        name = header.rpartition("<|channel|>")[2].partition("<|message|>")[0].strip()
        is_open = "<|message|>" in header
        is_thought = is_open and name == _THOUGHT_CHANNEL
        final = (self.channel, *self.final, self.message)
        thoughts = Thoughts(
            end=final,
            closing=(self.end, self.start, *self.assistant, *final),
            start=None if is_thought else self.message,
            is_open=True,
        )
        first = Part.MARK if not is_open else Part.THOUGHT if is_thought else Part.TEXT
        return Opening(
            None if is_open and not is_thought else thoughts, lambda: ChannelParser(self, first)
        )


class ChannelParser:
    __slots__ = ("_format", "_header", "_part", "call_head")

    def __init__(self, format_: ChannelFormat, part: Part) -> None:
        self._format = format_
        self._part = part  # MARK: within a header
        self._header: list[int] = []
        self.call_head: Sequence[int] = ()

    def push(self, token_id: int) -> Part:
        form = self._format
        self.call_head = ()
        if self._part is not Part.MARK:
            if token_id not in (form.end, form.start, form.channel):
                return self._part
            self._header.clear()
            self._part = Part.MARK
            if token_id == form.channel:
                self._header.append(token_id)
            return Part.MARK
        if token_id != form.message:
            self._header.append(token_id)
            return Part.MARK
        self._part = self._named()
        return Part.MARK

    def _named(self) -> Part:
        """Return what follows the header: only the channel `analysis` has thoughts."""
        header, channel = self._header, self._format.channel
        if channel not in header:
            return Part.TEXT
        head = header[header.index(channel) :]
        name = self._format.decode(head[1:])
        if name.startswith(_CALL_CHANNEL):
            self.call_head = (*head, self._format.message)
        return Part.THOUGHT if name.split()[:1] == [_THOUGHT_CHANNEL] else Part.TEXT


# ── detection ──


def detect(tokenizer: Any, template: str, wanted: str) -> ReasoningFormat | None:
    """Return the format of a model's thoughts; None if it has none that is known.

    Args:
        tokenizer: of Transformers.
        template: the text of the chat template.
        wanted: the worker's setting `reasoning_format`. "auto" takes the format whose marks are
            tokens and occur in the template; a name takes that format if its marks are tokens;
            "none" takes none.

    Raises:
        ValueError: if the marks of the named format are no tokens of this model.
    """
    if wanted == "none":
        return None
    found = None
    if wanted in ("auto", "channels") and (wanted != "auto" or "<|channel|>" in template):
        found = _channels(tokenizer)
    if found is None and wanted in ("auto", "think"):
        found = _tags(tokenizer, None if wanted == "think" else template)
    if found is None and wanted != "auto":
        raise ValueError(f"is {wanted!r}, but this model has no tokens that mark such thoughts")
    return found


def _tags(tokenizer: Any, template: str | None) -> ReasoningFormat | None:
    added = tokenizer.get_added_vocab()
    for start, end in TAGS:
        is_used = template is None or start in template or end in template
        if is_used and start in added and end in added:
            return TagFormat(added[start], added[end], start, end)
    return None


def _channels(tokenizer: Any) -> ReasoningFormat | None:
    added = tokenizer.get_added_vocab()
    if any(mark not in added for mark in _CHANNEL_MARKS):
        return None
    start, channel, message, end = (added[mark] for mark in _CHANNEL_MARKS)
    return ChannelFormat(
        start, channel, message, end,
        tuple(tokenizer.encode("assistant", add_special_tokens=False)),
        tuple(tokenizer.encode(_FINAL, add_special_tokens=False)),
        lambda ids: str(tokenizer.decode(ids)),
    )  # fmt: skip
