"""Turns tokens into text, one at a time: each push returns the text that no later token can change.

All pushes and the flush together give exactly what the tokenizer makes of all tokens at once,
without its special tokens. What each token contributes is read from a fast tokenizer's decoder. The
two common families of decoders are reproduced by state machines that hold a few bytes. For any
other decoder, a short window of tokens is decoded at each push. Stop strings are handled elsewhere.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
MAX_WINDOW = 32  # tokens that a window waits for a character to become complete


class Detokenizer(Protocol):
    """One sequence's detokenizer. It must get every output token, in order."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """Return the text after the last token. Incomplete characters become U+FFFD, as in the
        tokenizer's own decoding.
        """
        ...


class ByteLevelDetokenizer:
    """Decodes byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2): tokens are byte strings, which
    together are UTF-8.
    """

    __slots__ = ("_decoder", "_is_between", "_piece", "_plain")

    def __init__(
        self, piece: Callable[[int], bytes], plain: Mapping[int, str] | None = None
    ) -> None:
        """`plain`: the text of tokens that are known to be ASCII. Most tokens are, and the decoder
        is slow.
        """
        self._piece = piece
        self._plain = plain if plain is not None else {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True  # not within a multi-byte character

    def push(self, token_id: int) -> str:
        if self._is_between and (plain := self._plain.get(token_id)) is not None:
            return plain
        text = self._decoder.decode(self._piece(token_id))
        self._is_between = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """Decodes SentencePiece-like BPE (Llama 2, Mistral, Gemma): tokens are text, and rare
    characters come as byte tokens.

    A run of byte tokens is text if the whole run is UTF-8, else one U+FFFD per byte. So no text of
    a run is certain before the run has ended or has become invalid.
    """

    def __init__(
        self, piece: Callable[[int], str | int | None], strip: str = "", max_stripped: int = 0
    ) -> None:
        self._piece = piece
        self._strip = strip  # the character that may be cut from the beginning
        self._to_strip = max_stripped
        self._run = bytearray()  # bytes of the current run
        self._broken = False  # whether the current run is invalid UTF-8
        self._checker = codecs.getincrementaldecoder("utf-8")()

    def push(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if piece is None:  # a special token does not even end a run
            return ""
        text = self._push_byte(piece) if isinstance(piece, int) else self._end_run() + piece
        return self._stripped(text)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _push_byte(self, byte: int) -> str:
        if self._broken:
            return REPLACEMENT
        self._run.append(byte)
        try:
            self._checker.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._broken = True
            return REPLACEMENT * len(self._run)
        return ""

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, broken = bytes(self._run), self._broken
        self._run.clear()
        self._broken = False
        self._checker.reset()
        if broken:  # returned already
            return ""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._strip:
                self._to_strip = 0
            else:
                text = text[1:]
                self._to_strip -= 1
        return text


class WindowDetokenizer:
    """Works with any other decoder: compares the decoded window of last tokens with and without the
    new token.

    The result is right if a token's text depends only on the tokens just before it. The window
    moves on with every piece of text that does not end in an incomplete character.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], skipped: frozenset[int] = frozenset()
    ) -> None:
        self._decode = decode
        self._skipped = skipped  # special tokens, which would only fill the window
        self._window: list[int] = []
        self._delivered = ""  # text of the window that was returned
        self._num_delivered = 0  # tokens of the window whose text was returned

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        waited = len(self._window) - self._num_delivered
        if len(text) <= len(self._delivered) or (
            text.endswith(REPLACEMENT) and waited < MAX_WINDOW
        ):
            return ""
        new = text[len(self._delivered) :]
        del self._window[: self._num_delivered]
        self._num_delivered = len(self._window)
        self._delivered = self._decode(self._window)
        return new

    def flush(self) -> str:
        return self._decode(self._window)[len(self._delivered) :] if self._window else ""


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
