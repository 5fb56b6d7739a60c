"""Reads from a fast tokenizer's decoder what each token contributes to the text.

The module recognises the two common families of decoders and picks the detokenizer that reproduces
them exactly. Any other decoder is left to the window detokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenmill_worker.text.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    Detokenizer,
)


def _byte_letters() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the letters
    from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + i): byte for i, byte in enumerate(rest)
    }


BYTE_OF_LETTER = _byte_letters()


def token_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token. A token with a letter outside the alphabet (an added
    token) stands for itself.
    """
    try:
        return bytes([BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode()


def byte_of(token: str) -> int | None:
    """Return the byte of a fallback token like `<0x0A>`; None for another token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


@dataclass(slots=True)
class ByteLevelPieces:
    """Maps token ids to bytes; each id is looked up once."""

    token_of: Callable[[int], str | None]
    special: frozenset[int]
    _known: dict[int, bytes] = field(default_factory=dict)
    _plain: dict[int, str] = field(default_factory=dict)  # the known ones that are ASCII

    def piece(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            token = None if token_id in self.special else self.token_of(token_id)
            found = self._known[token_id] = b"" if token is None else token_bytes(token)
            if found.isascii():
                self._plain[token_id] = found.decode("ascii")
        return found

    bytes_of = piece

    def detokenizer(self) -> Detokenizer:
        return ByteLevelDetokenizer(self.piece, self._plain)


@dataclass(slots=True)
class FallbackPieces:
    """Maps token ids to text, to the byte of a byte token, or to None for a token that is
    skipped.
    """

    token_of: Callable[[int], str | None]
    special: frozenset[int]
    replacements: tuple[tuple[str, str], ...] = ()
    strip: str = ""
    max_stripped: int = 0
    _known: dict[int, str | int | None] = field(default_factory=dict)

    def piece(self, token_id: int) -> str | int | None:
        try:
            return self._known[token_id]
        except KeyError:
            token = None if token_id in self.special else self.token_of(token_id)
            piece = self._known[token_id] = None if token is None else self._read(token)
            return piece

    def bytes_of(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        return bytes((piece,)) if isinstance(piece, int) else (piece or "").encode()

    def _read(self, token: str) -> str | int:
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = byte_of(token)
        return token if byte is None else byte

    def detokenizer(self) -> Detokenizer:
        return ByteFallbackDetokenizer(self.piece, self.strip, self.max_stripped)


Pieces = ByteLevelPieces | FallbackPieces


def read_pieces(backend: Any, special: frozenset[int]) -> Pieces | None:
    """Read the decoder of a `tokenizers.Tokenizer`. Returns None if it is of neither family."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelPieces(backend.id_to_token, special)
    if "ByteFallback" not in kinds:
        return None
    at = kinds.index("ByteFallback")
    before, after = steps[:at], steps[at + 1 :]
    replacements = [_replacement(step) for step in before]
    strip = _strip(after)
    if None in replacements or strip is None:
        return None
    pairs = tuple(pair for pair in replacements if pair is not None)
    return FallbackPieces(backend.id_to_token, special, pairs, *strip)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    """Return the (old, new) pair of a replacing step, else None. Only replacing one letter by text
    gives the same result token by token as on the whole text.
    """
    old = step.get("pattern", {}).get("String") if step.get("type") == "Replace" else None
    return (old, step["content"]) if old else None


def _strip(steps: list[dict[str, Any]]) -> tuple[str, int] | None:
    """Read the steps after the byte fallback: nothing, Fuse, or Fuse and a Strip at the beginning.
    Returns (letter, most letters to strip); None for other steps.
    """
    kinds = [step.get("type") for step in steps]
    if kinds in ([], ["Fuse"]):
        return "", 0
    if kinds == ["Fuse", "Strip"] and not steps[1]["stop"]:
        return steps[1]["content"], steps[1]["start"]
    return None
