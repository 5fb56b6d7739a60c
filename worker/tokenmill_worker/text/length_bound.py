"""Computes the least number of tokens that a text can have, without tokenising it.

A byte counts 1 / L, where L is the length of the longest token that contains this byte. The bytes
of one token count 1 together at most, so those of a text count at most as much as it has tokens.
The vocabulary alone decides; merges do not matter. Tokenising megabytes takes seconds and a
gigabyte of memory, this takes milliseconds.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tokenmill_worker.text.token_pieces import BYTE_OF_LETTER, byte_of

Weights = npt.NDArray[np.float32]

_CHARS_AT_ONCE: Final = 1 << 18
_NUM_CODE_POINTS: Final = 0x110000
_ROUNDING: Final = 1 - 1e-4  # of a sum of millions of 32-bit numbers
_BLOCK: Final = "▁"  # stands for a space
# Pre-tokenizers that cut a text and remove nothing of it; Split is looked at by its behaviour.
_CUTTING: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
# Code points that NFC leaves as they are, and that join no character before them: Latin, CJK
# ideographs, Hangul syllables, emojis and other symbols.
_INERT: Final = ((0, 0x300), (0x3400, 0xA000), (0xAC00, 0xD7A4), (0x1F000, 0x20000))


class LengthBound:
    """The bound of one tokenizer. `weights`: what each code point counts."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens below which the text cannot be encoded."""
        total = 0.0
        for start in range(0, len(text), _CHARS_AT_ONCE):
            part = text[start : start + _CHARS_AT_ONCE].encode("utf-32-le", "surrogatepass")
            points = np.frombuffer(part, np.uint32)
            total += float(self._weights[points].sum(dtype=np.float64))
        return max(0, math.ceil(total * _ROUNDING))


def read_bound(backend: Any) -> LengthBound | None:
    """Return the bound of a `tokenizers.Tokenizer`; None if its vocabulary alone bounds nothing: it
    removes text, joins unknown text into one token, or rewrites it in a way not known here.
    """
    cuts = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    rewrites = list(_steps(backend.normalizer, "normalizers"))
    is_byte_level = any(cut["type"] == "ByteLevel" for cut in cuts)
    has_blocks = any(cut["type"] == "Metaspace" for cut in cuts)
    if type(backend.model).__name__ != "BPE" or not all(map(_removes_nothing, cuts)):
        return None
    for rewrite in rewrites:
        if rewrite == {"type": "Replace", "pattern": {"String": " "}, "content": _BLOCK}:
            has_blocks = True
        elif rewrite["type"] not in ("NFC", "Prepend"):
            return None
    tokens = backend.get_vocab(with_added_tokens=False)
    longest = _of_byte_level(tokens) if is_byte_level else _of_text(tokens, has_blocks)
    if not (is_byte_level or all(longest)):
        return None
    added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
    for token in added:
        spelled = token.content.replace(_BLOCK, " ") if has_blocks else token.content
        _note(longest, spelled.encode(), len(spelled.encode()))
    weights = _of_code_points(longest)
    if has_blocks:
        weights[ord(_BLOCK)] = weights[ord(" ")]
    if any(token.lstrip or token.rstrip for token in added):  # they take spaces beside them
        weights[[point for point in range(0x3001) if chr(point).isspace()]] = 0
    if any(rewrite["type"] == "NFC" for rewrite in rewrites):
        weights = _with_composition(weights)
    return LengthBound(weights)


def _steps(part: Any, inside: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normaliser or pre-tokenizer; those of a sequence one by one."""
    if part is None:
        return
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += step[inside]
        else:
            yield step


def _removes_nothing(cut: dict[str, Any]) -> bool:
    return cut["type"] in _CUTTING and cut.get("behavior") != "Removed"


def _of_byte_level(tokens: Iterable[str]) -> list[int]:
    """Return the length of the longest token that contains each byte. Each letter is a byte."""
    longest = [0] * 256
    for length, joined in _by_length((len(token), token) for token in tokens):
        known = (BYTE_OF_LETTER.get(letter) for letter in set("".join(joined)))
        _note(longest, (byte for byte in known if byte is not None), length)
    return longest


def _of_text(tokens: Iterable[str], has_blocks: bool) -> list[int]:
    """Likewise for tokens that are text; those like `<0x0A>` are bytes. Without one for each byte,
    unknown text becomes one token of any length.
    """
    longest = [0] * 256
    spelled: list[bytes] = []
    for token in tokens:
        byte = byte_of(token)
        if byte is not None:
            longest[byte] = 1
        spelled.append((token.replace(_BLOCK, " ") if has_blocks else token).encode())
    if not all(longest):
        return longest
    for length, joined in _by_length((len(token), token) for token in spelled):
        _note(longest, b"".join(joined), length)
    return longest


def _by_length(tokens: Iterable[tuple[int, Any]]) -> Iterable[tuple[int, list[Any]]]:
    groups: defaultdict[int, list[Any]] = defaultdict(list)
    for length, token in tokens:
        groups[length].append(token)
    return groups.items()


def _note(longest: list[int], found: Iterable[int], length: int) -> None:
    for byte in set(found):
        longest[byte] = max(longest[byte], length)


def _of_code_points(longest: list[int]) -> Weights:
    """Return what each code point counts: as much as the bytes of its UTF-8 together."""
    # a byte that no token has is left out of the text
    byte = np.array([1 / length if length else 0.0 for length in longest])
    last = byte[0x80:0xC0]
    second, third = last[:, None], last[:, None, None]
    # all code points up to the largest that so many bytes can spell
    of_two = byte[0xC0:0xE0, None] + last
    of_three = byte[0xE0:0xF0, None, None] + second + last
    of_four = byte[0xF0:0xF5, None, None, None] + third + second + last
    weights: Weights = of_four.ravel()[:_NUM_CODE_POINTS].astype(np.float32)
    weights[:0x10000] = of_three.ravel()
    weights[:0x800] = of_two.ravel()
    weights[:0x80] = byte[:0x80]
    return weights


def _with_composition(weights: Weights) -> Weights:
    """Return the weights of a text that is composed (NFC) before it is encoded. A code point that
    may join the character before it takes that one's weight away.
    """
    is_inert = np.zeros(len(weights), np.bool_)
    for start, end in _INERT:
        is_inert[start:end] = True
    composed: Weights = np.where(is_inert, weights, -weights[is_inert].max()).astype(np.float32)
    return composed
