"""Splits what a batch reads and writes into pages: one round trip or one transaction each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

PAGE: Final = 500


def paged(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items in lists of at most PAGE."""
    rest = iter(items)
    while page := list(islice(rest, PAGE)):
        yield page
