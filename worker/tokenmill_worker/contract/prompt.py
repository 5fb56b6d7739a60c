"""A prompt: token ids, and which of them stand for pictures or other media."""

from __future__ import annotations

import msgspec


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a prompt in whose place the model reads a medium.

    `digest` identifies its content: prompts with equal token ids and other digests are different.
    """

    start: int  # index of its first token
    length: int  # in tokens
    kind: str  # "image"
    digest: bytes


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds what a model reads before its answer: token ids, and spans of media in order."""

    token_ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)
