"""Gives the tokens of an answer with their log-probabilities, as OpenAI's API does.

A token's text is its own, as the worker names it by bytes. A result and a chunk of a stream have
these alike, so both are read here.
"""

from __future__ import annotations

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
    content = [
        TokenLogprobs(
            token=token_text(entry.token_bytes),
            logprob=entry.logprob,
            bytes=list(entry.token_bytes),
            top_logprobs=[
                TopLogprob(token_text(data), value, list(data))
                for (_, value), data in zip(entry.top, entry.top_bytes, strict=False)
            ],
        )
        for entry in part.logprobs
    ]
    return ChatLogprobs(content)


def text_logprobs(
    part: ChoiceResult | Chunk, prompt: ScoredPrompt | None
) -> CompletionLogprobs | None:
    """Return the log-probabilities in the form of completions, after those of a prompt that is
    echoed; None if none were asked for.
    """
    if part.logprobs is None:
        return None
    entries, ends = part.logprobs, part.text_ends
    texts: list[str] = []  # of the prompt's first token, which has no log-probability
    if prompt is not None and prompt.text_ends:
        texts = [part.text[: prompt.text_ends[0]]]
        entries, ends = prompt.logprobs + entries, prompt.text_ends + ends
    nothing: list[None] = [None] * len(texts)
    texts += [token_text(entry.token_bytes) for entry in entries]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[*nothing, *(entry.logprob for entry in entries)],
        top_logprobs=[*nothing, *map(_tops, entries)],
        text_offset=[0, *ends[:-1]][: len(texts)],
    )


def _tops(entry: TokenLogprob) -> dict[str, float]:
    """Return the most likely tokens by their text; of two with one text, the likelier."""
    tops: dict[str, float] = {}
    for (_, value), data in zip(entry.top, entry.top_bytes, strict=False):
        tops.setdefault(token_text(data), value)
    return tops
