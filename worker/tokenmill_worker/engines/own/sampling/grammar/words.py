"""A vocabulary with the tokens that stand for a text, as llguidance asks for them.

A text is only a text: the letters of a special token, or of one that ends an answer, never become
that token. The text that a grammar forces may be of any length, and is cut here: a draft holds few
of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

Encode = Callable[[str], Sequence[int]]

MAX_FORCED: Final = 16  # tokens of a draft that a grammar forces
MAX_TEXT: Final = 2_048  # bytes of a text; more than the tokens of a draft stand for


class Words:
    """The tokens of one model: their bytes, and which of them may stand for a text."""

    def __init__(
        self,
        vocab: Sequence[bytes],
        stop_token_ids: Sequence[int],
        special_ids: Sequence[int] = (),
        encode: Encode | None = None,
    ) -> None:
        self.tokens = list(vocab)
        self.stop_token_ids = list(stop_token_ids)
        self.eos_token_id = self.stop_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted({*special_ids, *stop_token_ids})
        self._encode = encode
        self.special = frozenset(self.special_token_ids)
        self._ids = {text: i for i, text in enumerate(vocab) if text and i not in self.special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens that stand for exactly these bytes: the model's own, or else the longest
        that fit. Of a text longer than MAX_TEXT, the tokens of its beginning.
        """
        text = _beginning(text)
        if self._encode is not None:
            ids = list(self._encode(text.decode("utf-8", "replace")))
            if self.special.isdisjoint(ids) and b"".join(self.tokens[i] for i in ids) == text:
                return ids
        found, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (token_id := self._ids.get(text[start:end])) is not None:
                    found.append(token_id)
                    start = end
                    break
            else:
                start += 1  # no token stands for it
        return found


def _beginning(text: bytes) -> bytes:
    """Cut a long text in front of a character."""
    if len(text) <= MAX_TEXT:
        return text
    end = MAX_TEXT
    while end > MAX_TEXT - 4 and text[end] & 0xC0 == 0x80:
        end -= 1
    return text[:end]
