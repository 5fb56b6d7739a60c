"""Draws texts that break naive code: letters of special tokens, emojis, combining and control
characters, CJK, lone surrogates, JSON and templates, alone and mixed.
"""

from __future__ import annotations

import random
from typing import Final

from tests.support.tiny_llama import MARKS, SPECIAL

_SPECIAL: Final = (
    *SPECIAL, *MARKS, "<|im_", "start|>", "</tool", "_call>", "<pad>", "<s>", "</s>", "<unk>",
    "<|eot_id|>", "<start_of_turn>", "[INST]", "<tool_response>", "<|channel|>", "<0x41>",
)  # fmt: skip
_EMOJIS: Final = ("😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇨🇭", "👍🏽", "☀️", "1️⃣", "🫠")
_COMBINING: Final = ("e\u0301", "a\u0308\u0323", "\u0301", "Z\u0351\u036b\u0343", "\u200d", "ﷺ")
_CONTROLS: Final = (
    "\0", "\x01", "\x07", "\x08", "\x1b[2J", "\x1b]0;x\x07", "\x7f", "\x85", "\x9b", "\u2028",
    "\u202e", "\ufeff", "\r\n", "\n\n\n", "\t", "\v", "\ufffd", "\uffff", "\U0010ffff",
)  # fmt: skip
_CJK: Final = ("漢字", "かな", "한국어", "𠮷", "、。", "〇", "ｆｕｌｌ", "العربية", "עברית", "ไทย")
_SYNTAX: Final = (
    "{{ 7 * 7 }}", "{% for x in y %}", '{"a": [', "}]", '"', "\\", "\\u0000", "\\ud800", "%s",
    "${x}", "'; DROP TABLE jobs; --", "../../etc/passwd", "http://[::1]/", "tm:{q}:meta", "null",
    "NaN", "-0", "1e999", "true", "</script>", "<!--", "=cmd", "{q}", ":", "%3A", "*", "?", "[a-z]",
)  # fmt: skip
_WORDS: Final = ("Hello", "world", "why", "is", "the", "sky", "blue", "naïve", "Straße", "ı", "ﬁ")
SURROGATES: Final = ("\ud800", "\udfff", "\ud83d", "\udc80")
_KINDS: Final = (_SPECIAL, _EMOJIS, _COMBINING, _CONTROLS, _CJK, _SYNTAX, _WORDS, _WORDS)


def draw_text(chance: random.Random, pieces: int = 8, *, with_zero: bool = True) -> str:
    """Return a text of up to `pieces` pieces; valid Unicode. Without `with_zero` it has no null
    character, as names and metadata must.
    """
    kinds = _KINDS if chance.random() < 0.6 else (chance.choice(_KINDS),)
    between = chance.choice(("", "", " ", "\n"))
    drawn = (_piece(chance, kinds) for _ in range(chance.randint(0, pieces)))
    text = between.join(drawn)
    return text if with_zero else text.replace("\0", "")


def _piece(chance: random.Random, kinds: tuple[tuple[str, ...], ...]) -> str:
    if chance.random() < 0.1:
        return chr(chance.choice((chance.randrange(0xD800), chance.randrange(0xE000, 0x110000))))
    piece = chance.choice(chance.choice(kinds))
    return piece * chance.choice((1, 1, 1, 1, 2, 40))


def draw_long_text(chance: random.Random) -> str:
    """Return a text of a few hundred to a few hundred thousand characters."""
    piece = draw_text(chance, 3) or "a"
    return piece * (chance.choice((300, 3_000, 3_000, 30_000, 300_000)) // len(piece) + 1)


def draw_broken_text(chance: random.Random) -> str:
    """Return a text with a lone surrogate."""
    return draw_text(chance, 2) + chance.choice(SURROGATES) + draw_text(chance, 2)
