"""Control characters are shown as escapes; everything else stays."""

import json
import unicodedata

import pytest

from tokenmill_schemas.visible import visible, visible_json

ASCII_AND_C1 = "".join(map(chr, range(0x100)))


@pytest.mark.parametrize("code", [0x00, 0x07, 0x0D, 0x1B, 0x7F, 0x80, 0x9B, 0x9F])
def test_a_control_character_is_escaped(code: int) -> None:
    assert visible(f"a{chr(code)}b") in (f"a\\x{code:02x}b", "a\\rb")


def test_every_control_character_but_line_breaks_and_tabs_is_escaped() -> None:
    left = [letter for letter in visible(ASCII_AND_C1) if unicodedata.category(letter) == "Cc"]
    assert left == ["\t", "\n"]
    assert not [x for x in visible(ASCII_AND_C1, keep="") if unicodedata.category(x) == "Cc"]
    assert visible("a\nb", keep="") == "a\\nb"


@pytest.mark.parametrize("letter", ["\u202e", "\u2066", "\u2028", "\ud800"])
def test_bidi_marks_line_separators_and_surrogates_are_escaped(letter: str) -> None:
    assert visible(f"a{letter}") == f"a\\u{ord(letter):04x}"


def test_letters_of_every_script_are_unchanged() -> None:
    words = "é ñ 漢字 עברית עربي 🦊👩\u200d🚀 \u00a0 –"
    assert visible(words) == words


def test_json_stays_json_with_the_same_value() -> None:
    document = json.dumps({"a": ASCII_AND_C1 + "\u202e🦊"}, ensure_ascii=False, indent=1)
    shown = visible_json(document)
    assert json.loads(shown) == json.loads(document)
    assert [x for x in shown if unicodedata.category(x) == "Cc"] == ["\n"] * 2
