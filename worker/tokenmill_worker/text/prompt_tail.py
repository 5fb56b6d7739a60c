"""Finds the end of a prompt that is enough to encode what follows the prompt.

Continuations of one prompt are read in one piece with it, and there may be 128 of them. The text
is cut at a place that no token can span: no token of the vocabulary holds the letter before the
place followed by the one behind it. Byte-pair encoding never merges across it, so that the tokens
before it are the same whatever follows. A place counts only if the prompt, cut there, has its own
tokens; pre-tokenizers read from left to right, and look one character ahead.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

from tokenmill_worker.text.token_pieces import BYTE_OF_LETTER

MIN_CHARS: Final = 256  # behind the place: longer than any added token
_MOST_TRIED: Final = 2_000  # places
_MOST_ENCODED: Final = 8
_LETTER_OF_BYTE: Final = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
_BREAK: Final = "\n\n"  # between tokens; no pair has it

Encode = Callable[[str, bool], tuple[int, ...]]


class PromptTail:
    """Cuts prompts of one tokenizer."""

    def __init__(self, backend: Any, encode: Encode) -> None:
        self._encode = encode
        self._is_byte_level = "ByteLevel" in str(backend.pre_tokenizer)
        self._is_bpe = type(backend.model).__name__ == "BPE"
        self._vocabulary = _BREAK.join(backend.get_vocab())
        self._spanned: dict[str, bool] = {}

    def find(self, text: str, ids: tuple[int, ...], special: bool) -> tuple[int, int]:
        """Return where the tail begins: the place in the prompt's text and in its tokens; (0, 0) if
        there is no such place.
        """
        for start in islice(self._places(text), _MOST_ENCODED):
            tail = self._encode(text[start:], False)
            count = len(ids) - len(tail)
            if ids[count:] == tail and self._encode(text[:start], special) == ids[:count]:
                return start, count
        return 0, 0

    def _places(self, text: str) -> Iterator[int]:
        last = len(text) - MIN_CHARS
        if not self._is_bpe:
            return
        for start in range(last, max(0, last - _MOST_TRIED), -1):
            is_mark = unicodedata.combining(text[start])  # may move before the place
            if not is_mark and not self._is_spanned(text[start - 1], text[start]):
                yield start

    def _is_spanned(self, before: str, behind: str) -> bool:
        """Return whether a token may hold both characters, one after the other."""
        if self._is_byte_level:
            ends = _LETTER_OF_BYTE[before.encode()[-1]], _LETTER_OF_BYTE[behind.encode()[0]]
            pair = "".join(ends)
        else:
            pair = (before + behind).replace(" ", "▁")
        found = self._spanned.get(pair)
        if found is None:
            found = self._spanned[pair] = pair in self._vocabulary
        return found
