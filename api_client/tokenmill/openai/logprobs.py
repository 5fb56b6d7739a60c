"""Gives the tokens of an answer with their text and log-probabilities, as OpenAI's API does.

The text of each token comes from the places where the tokens' texts end. A result and a chunk of a
stream name these alike, so both are read here. For tokens that were not chosen only the id is
known; they are named `token_id:ID`.
"""

from __future__ import annotations

from itertools import zip_longest

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.openai import ChatLogprobs, CompletionLogprobs, TokenLogprobs, TopLogprob
from tokenmill_schemas.result import ChoiceResult, ScoredPrompt


def pieces(part: ChoiceResult | Chunk) -> list[str]:
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


def chat_logprobs(part: ChoiceResult | Chunk) -> ChatLogprobs | None:
    """Return the log-probabilities in the form of chats and responses; None if none were asked
    for.
    """
    if part.logprobs is None:
        return None
    content = [
        TokenLogprobs(
            token=text,
            logprob=entry.logprob,
            bytes=list(text.encode()),
            top_logprobs=[
                _top(token, value, part.token_ids[place], text) for token, value in entry.top
            ],
        )
        for place, (text, entry) in enumerate(zip(pieces(part), part.logprobs, strict=False))
    ]
    return ChatLogprobs(content)


def _top(token_id: int, logprob: float, chosen: int, text: str) -> TopLogprob:
    if token_id == chosen:
        return TopLogprob(text, logprob, list(text.encode()))
    return TopLogprob(f"token_id:{token_id}", logprob)


def text_logprobs(
    part: ChoiceResult | Chunk, prompt: ScoredPrompt | None
) -> CompletionLogprobs | None:
    """Return the log-probabilities in the form of completions, after those of a prompt that is
    echoed; None if none were asked for.
    """
    if part.logprobs is None:
        return None
    ids, entries, ends, texts = part.token_ids, part.logprobs, part.text_ends, pieces(part)
    first: list[None] = []  # stands for the prompt's first token
    if prompt is not None and prompt.text_ends:
        first = [None]
        own = [text[prompt.text_ends[-1] :] for text in texts[:1]]
        texts = [*_cut(part.text, prompt.text_ends), *own, *texts[1:]]
        ids, ends = prompt.token_ids + ids, prompt.text_ends + ends
        entries = prompt.logprobs + entries
    scored = zip(texts[len(first) :], ids[len(first) :], entries, strict=False)
    tops = [
        {text if token == chosen else f"token_id:{token}": value for token, value in entry.top}
        for text, chosen, entry in scored
    ]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[*first, *(entry.logprob for entry in entries)],
        top_logprobs=[*first, *tops],
        text_offset=[0, *ends[:-1]][: len(texts)],
    )
