"""Parameters of which most are left to the slow tests, which `.ci/run` runs."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_unless(fast: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values; those that are not in `fast` are marked slow."""
    return [
        value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
