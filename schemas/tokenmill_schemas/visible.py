"""Shows control characters as escapes, for terminals and logs.

A terminal obeys the control characters that it receives: text of a job could set its title, its
clipboard, or the lines above.
"""

from __future__ import annotations

import re
from typing import Final

# C0, DEL and C1; marks that reorder the text around them; line separators; lone surrogates
_HIDDEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str, keep: str = "\n\t") -> str:
    """Return the text with each control character, except those to keep, as an escape such as
    `\\x1b`.
    """
    return _HIDDEN.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def visible_json(document: str) -> str:
    """Return a JSON document with the control characters of its texts as escapes of JSON."""
    return _HIDDEN.sub(
        lambda found: found[0] if found[0] in "\n\t" else f"\\u{ord(found[0]):04x}", document
    )


def _escape(letter: str) -> str:
    code = ord(letter)
    return _NAMED.get(letter) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
