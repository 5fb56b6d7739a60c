"""Parameters of which most are left to the slow tests or to the long form."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

LONG = 50  # `--rounds` from which on a run is of the long form


def slow_unless(fast: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values; those that are not in `fast` are marked slow."""
    return _marked_unless(fast, values, pytest.mark.slow)


def long_unless(short: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values; those that are not in `short` are marked long. A tuple is the values of
    several parameters.
    """
    return _marked_unless(short, values, pytest.mark.long)


def _marked_unless(kept: Container[Any], values: Iterable[Any], mark: Any) -> list[Any]:
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
        for value in values
    ]
