"""Grows the output items of a response token by token, and names each change.

An item begins where the kind of what a token adds changes: thoughts, text, a call. Every token
makes one delta, an empty one where its text is held back, so that the number of changes depends on
the tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from tokenmill.openai.pieces import Piece
from tokenmill_schemas.openai import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    TokenLogprobs,
)

Kind = Literal["reasoning", "message", "function_call"]
_SHORT: Final = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(slots=True)
class GrowingItem:
    """An item of the output: its text so far, which is the arguments of a call."""

    kind: Kind
    id: str
    index: int  # in the output
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def item(self) -> OutputItem:
        """Return it as the API shows it."""
        if self.kind == "reasoning":
            texts = [ReasoningText(self.text)] if self.status != "in_progress" else []
            return ReasoningItem(id=self.id, content=texts, status=self.status)
        if self.kind == "function_call":
            return FunctionCallItem(
                id=self.id,
                call_id=self.call_id,
                name=self.name,
                arguments=self.text,
                status=self.status,
            )
        content = [self.content()] if self.status != "in_progress" else []
        return MessageItem(id=self.id, content=content, status=self.status)

    def content(self) -> OutputText:
        return OutputText(text=self.text, logprobs=self.logprobs)


@dataclass(frozen=True, slots=True)
class Change:
    """A change by a token: an item begins, grows by `delta`, or ends."""

    what: Literal["begins", "grows", "ends"]
    item: GrowingItem
    delta: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class GrowingOutput:
    """The output of one response."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._items: list[GrowingItem] = []
        self._calls: dict[int, GrowingItem] = {}
        self._held: tuple[TokenLogprobs, ...] = ()  # of tokens before the first item

    def add(self, piece: Piece) -> Iterator[Change]:
        """Yield what a token changes."""
        scores = () if piece.logprobs is None else (piece.logprobs,)
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning)
        if piece.text:
            yield from self._grow("message", piece.text, scores)
        for delta in piece.calls:
            if delta.index not in self._calls:
                yield from self._begin("function_call", delta.id, delta.name)
                self._calls[delta.index] = self._items[-1]
            item = self._calls[delta.index]
            item.parts.append(delta.arguments)
            yield Change("grows", item, delta.arguments)
        if any(piece[:3]):
            return
        if not self._items:  # the first bytes of a character, say: the message has yet to begin
            self._held += scores
        elif self._items[-1].status == "in_progress":
            yield from self._grow(self._items[-1].kind, "", scores)

    def end(self, *, is_whole: bool, has_whole_calls: bool) -> Iterator[Change]:
        """Yield the end of the last item, which is incomplete if the answer was cut in it. A whole
        answer without any item has an empty message.
        """
        if not self._items and is_whole:
            yield from self._begin("message")
        if self._items:
            is_call = self._items[-1].kind == "function_call"
            is_complete = has_whole_calls if is_call else is_whole
            yield from self._close("completed" if is_complete else "incomplete")

    def items(self) -> list[OutputItem]:
        return [item.item() for item in self._items]

    def _grow(
        self, kind: Kind, text: str, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> Iterator[Change]:
        if not self._items or self._items[-1].kind != kind:
            yield from self._begin(kind)
        item = self._items[-1]
        item.parts.append(text)
        if kind == "message":
            logprobs, self._held = self._held + logprobs, ()
            item.logprobs += logprobs
        yield Change("grows", item, text, logprobs if kind == "message" else ())

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._close("completed")
        number = sum(item.kind == kind for item in self._items)
        own = call_id or f"{self._job_id}_{number}" if number else call_id or self._job_id
        item = GrowingItem(kind, f"{_SHORT[kind]}_{own}", len(self._items), call_id, name)
        self._items.append(item)
        yield Change("begins", item)

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[Change]:
        if self._items and self._items[-1].status == "in_progress":
            self._items[-1].status = status
            yield Change("ends", self._items[-1])
