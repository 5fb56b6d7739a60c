"""Turns tokens into text, one at a time: each push returns the text that no later token can change.

All pushes and the flush together give exactly what the tokenizer makes of all tokens at once,
without its special tokens. The two common families of decoders are reproduced by state machines
that hold a few bytes. For any other decoder, a short window of tokens is decoded at each push. Stop
strings are handled elsewhere.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from typing import Protocol

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
        self._broken = False  # is the current run invalid UTF-8?
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
