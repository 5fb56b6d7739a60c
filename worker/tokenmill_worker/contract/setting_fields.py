"""Declares the fields of EngineConfig: their help, their limits, and the values they may have."""

from __future__ import annotations

from dataclasses import field
from functools import lru_cache
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def setting(default: T, help_text: str, *, minimum: int | None = None) -> T:
    """Return a field of the settings of an engine.

    Args:
        default: the value if none is given.
        help_text: the setting's line in `--help` and in the settings guide.
        minimum: the smallest value allowed. None: no limit, or one in the `problems` of the class.
    """
    return field(default=default, metadata={"help": help_text, "minimum": minimum})


def direct_value(default: T, *, minimum: int | None = None) -> T:
    """Return a field of EngineConfig that is no setting of a worker."""
    return field(default=default, metadata={"minimum": minimum})


@lru_cache
def choices(settings: type) -> dict[str, tuple[object, ...]]:
    """Return the allowed values of each setting that takes one of a few values."""
    found: dict[str, tuple[object, ...]] = {}
    for name, hint in get_type_hints(settings).items():
        kinds = (hint,) if get_origin(hint) is Literal else get_args(hint)
        if kinds and all(get_origin(kind) is Literal or kind is type(None) for kind in kinds):
            found[name] = tuple(value for kind in kinds for value in get_args(kind) or (None,))
    return found
