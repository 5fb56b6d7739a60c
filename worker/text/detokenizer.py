"""Tokens to text, one at a time: each push returns the text that no later token can change.

All pushes and the flush together give exactly what the tokenizer makes of all tokens at once, without
its special tokens. The two families of decoders in use are followed in state machines that hold a few
bytes; any other decoder is asked about a short window of tokens. It knows no stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_WINDOW = 32  # tokens that the window detokenizer waits for a character to become whole


class Detokenizer(Protocol):
    """One per sequence; it is told every output token, in order."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """The rest, after the last token: half characters become U+FFFD, as in the tokenizer's own decoding."""
        ...


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2): tokens are byte strings, together they are UTF-8."""

    __slots__ = ("_decoder", "_is_between", "_piece", "_plain")

    def __init__(self, piece: Callable[[int], bytes], plain: Mapping[int, str] | None = None) -> None:
        """`plain`: the text of tokens known to be ASCII. Most are, and the decoder is dear."""
        self._piece = piece
        self._plain = plain if plain is not None else {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True  # two characters, not within one

    def push(self, token_id: int) -> str:
        if self._is_between and (plain := self._plain.get(token_id)) is not None:
            return plain
        text = self._decoder.decode(self._piece(token_id))
        self._is_between = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """For SentencePiece-like BPE (Llama 2, Mistral, Gemma): tokens are text, rare characters come as byte tokens.

    A run of byte tokens is text if the whole run is UTF-8, else one U+FFFD per byte. So nothing of a run
    is certain before it has ended, except that it is broken.
    """

    def __init__(self, piece: Callable[[int], str | int | None], strip: str = "", max_stripped: int = 0) -> None:
        self._piece = piece
        self._strip = strip  # the character that may be cut from the beginning
        self._to_strip = max_stripped
        self._run = bytearray()  # UTF-8 so far
        self._broken = False  # is the current run?
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
        if broken:  # told already
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
    """For any other decoder: compares what it makes of the last tokens with and without the new one.

    Right wherever a token's text depends on the tokens just before it only; the window moves on with
    every piece of text that does not end in half a character.
    """

    def __init__(self, decode: Callable[[list[int]], str], skipped: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._skipped = skipped  # special tokens, which would only fill the window
        self._window: list[int] = []
        self._told = ""  # of the window's text
        self._num_told = 0  # tokens of the window that are told

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        waited = len(self._window) - self._num_told
        if len(text) <= len(self._told) or (text.endswith(REPLACEMENT) and waited < MAX_WINDOW):
            return ""
        new = text[len(self._told) :]
        del self._window[: self._num_told]
        self._num_told = len(self._window)
        self._told = self._decode(self._window)
        return new

    def flush(self) -> str:
        return self._decode(self._window)[len(self._told) :] if self._window else ""


def decode_all(detokenizer: Detokenizer, token_ids: Iterable[int]) -> str:
    """The text of a whole output, by a fresh detokenizer."""
    return "".join([*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()])
