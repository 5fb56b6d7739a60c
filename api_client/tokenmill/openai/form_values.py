"""Checks the keys of OpenAI's request shapes, and defines the error of a shape that is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenmill.errors import InvalidRequest


class FormError(InvalidRequest):
    """A shape was rejected. `param` names its place; `code` is the code that OpenAI's API gives."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__([message])
        self.args = (message, param, code)
        self.param = param
        self.code = code


def present(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the keys that have a value; null counts as absent."""
    return {name: value for name, value in given.items() if value is not None}


def refuse_unknown(
    given: Mapping[Any, Any], known: Iterable[str], where: str, hint: str = ""
) -> None:
    """Raise FormError for the first key that is not known."""
    known = tuple(known)
    for name in given:
        if name not in known:
            word = str(name)[:64]
            words = f"{where} has the unknown key {word!r}" + (
                f"{hint} {', '.join(known)}" if hint else ""
            )
            raise FormError(words, f"{where}.{word}", "unknown_parameter")


def shown(value: object) -> str:
    """Return the value as a message shows it, cut to 64 characters."""
    text = repr(value)
    return text if len(text) <= 64 else text[:61] + "..."
