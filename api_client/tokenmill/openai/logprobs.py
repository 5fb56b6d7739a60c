"""Gives the tokens of an answer with their log-probabilities, as OpenAI's API does.

A token's text is its own, as the worker names it by bytes. Results and chunks of a stream that were
written before workers named bytes have none: a chosen token's text is then cut out of the answer,
and every other one is named `token_id:ID`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat, zip_longest

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import TokenLogprob, token_text
from tokenmill_schemas.openai import ChatLogprobs, CompletionLogprobs, TokenLogprobs, TopLogprob
from tokenmill_schemas.result import ChoiceResult, ScoredPrompt


def chat_logprobs(part: ChoiceResult | Chunk) -> ChatLogprobs | None:
    """Return the log-probabilities in the form of chats and responses; None if none were asked
    for.
    """
    if part.logprobs is None:
        return None
    return ChatLogprobs(list(_named(part.logprobs, part.token_ids, _cut_texts(part))))


def text_logprobs(
    part: ChoiceResult | Chunk, prompt: ScoredPrompt | None
) -> CompletionLogprobs | None:
    """Return the log-probabilities in the form of completions, after those of a prompt that is
    echoed; None if none were asked for.
    """
    if part.logprobs is None:
        return None
    entries, ids, ends, cut = part.logprobs, part.token_ids, part.text_ends, _cut_texts(part)
    texts: list[str] = []  # of the prompt's first token, which has no log-probability
    if prompt is not None and prompt.text_ends:
        first, *others = _cut(part.text, prompt.text_ends)
        texts = [first]
        own = [text[prompt.text_ends[-1] :] for text in cut[:1]]
        entries, ids = prompt.logprobs + entries, prompt.token_ids[1:] + ids
        ends, cut = prompt.text_ends + ends, [*others, *own, *cut[1:]]
    nothing: list[None] = [None] * len(texts)
    tokens = list(_named(entries, ids, cut))
    texts += [token.token for token in tokens]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[*nothing, *(token.logprob for token in tokens)],
        top_logprobs=[*nothing, *map(_tops, tokens)],
        text_offset=[0, *ends[:-1]][: len(texts)],
    )


def _tops(token: TokenLogprobs) -> dict[str, float]:
    """Return the most likely tokens by their text; of two with one text, the likelier."""
    tops: dict[str, float] = {}
    for top in token.top_logprobs:
        tops.setdefault(top.token, top.logprob)
    return tops


def _named(
    entries: tuple[TokenLogprob, ...], ids: tuple[int, ...], cut: list[str]
) -> Iterator[TokenLogprobs]:
    """Yield each token with its alternatives; `cut` has the texts of tokens without bytes."""
    for entry, chosen, text in zip(entries, ids, chain(cut, repeat(None)), strict=False):
        own = _name(entry.token_bytes, chosen)
        if text is not None and not entry.token_bytes:
            own = text, list(text.encode())
        tops: list[TopLogprob] = []
        known = chain(entry.top_bytes, repeat(b""))
        for (token_id, value), data in zip(entry.top, known, strict=False):
            name, codes = own if token_id == chosen and not data else _name(data, token_id)
            tops.append(TopLogprob(name, value, codes))
        yield TokenLogprobs(token=own[0], logprob=entry.logprob, bytes=own[1], top_logprobs=tops)


def _name(data: bytes, token_id: int) -> tuple[str, list[int]]:
    return (token_text(data) if data else f"token_id:{token_id}"), list(data)


def _cut_texts(part: ChoiceResult | Chunk) -> list[str]:
    """Return the text of each token, of thoughts or of the answer; "" for a token that only began a
    character, or whose text was held back.
    """
    if len(part.token_ids) == 1 and not part.text_ends:  # a chunk of one token names no ends
        return [part.reasoning + part.text]
    texts = _cut(part.text, part.text_ends)
    thoughts = _cut(part.reasoning, part.reasoning_ends)
    return [thought + text for thought, text in zip_longest(thoughts, texts, fillvalue="")]


def _cut(text: str, ends: tuple[int, ...]) -> list[str]:
    return [text[start:end] for start, end in zip((0, *ends[:-1]), ends, strict=False)]
