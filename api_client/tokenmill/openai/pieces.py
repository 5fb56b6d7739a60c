"""Splits an answer into what each of its tokens adds, the same for its chunks and for its result.

So whatever counts pieces gives one number to one token, wherever the borders of chunks lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import NamedTuple

from tokenmill.openai.logprobs import chat_logprobs
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.openai import TokenLogprobs
from tokenmill_schemas.result import ChoiceResult, ToolCallDelta


class Piece(NamedTuple):
    """The part of an answer that one token adds; empty where its text is held back, or is a
    mark's.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    logprobs: TokenLogprobs | None = None


def pieces_of(part: ChoiceResult | Chunk) -> Iterator[Piece]:
    """Yield one piece per token, in order. What was held back until the end, behind the last token,
    is one more.
    """
    count = len(part.token_ids)
    calls: list[list[ToolCallDelta]] = [[] for _ in range(count + 1)]
    for delta in _call_deltas(part, count):
        calls[min(delta.token, count)].append(delta)
    known = chat_logprobs(part)
    scores = chain(known.content if known else (), repeat(None))
    texts = _cut(part.text, part.text_ends, count)
    thoughts = _cut(part.reasoning, part.reasoning_ends, count)
    for place, score in zip(range(count + 1), scores, strict=False):
        piece = Piece(texts[place], thoughts[place], tuple(calls[place]), score)
        if place < count or any(piece):
            yield piece


def _call_deltas(part: ChoiceResult | Chunk, count: int) -> tuple[ToolCallDelta, ...]:
    """Return the pieces of calls. A result without them has its calls behind the last token."""
    if isinstance(part, Chunk):
        return part.tool_calls
    whole = (
        ToolCallDelta(index, call.id, call.name, call.arguments, count)
        for index, call in enumerate(part.tool_calls)
    )
    return part.call_deltas or tuple(whole)


def _cut(text: str, ends: tuple[int, ...], count: int) -> list[str]:
    """Return what each of `count` tokens adds to a text, and the rest."""
    if count == 1 and not ends:  # a chunk of one token names no ends
        return [text, ""]
    ends = ends[:count]
    parts = [text[start:end] for start, end in zip((0, *ends[:-1]), ends, strict=False)]
    return [*parts, *[""] * (count - len(parts)), text[ends[-1] if ends else 0 :]]
