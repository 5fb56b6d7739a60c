"""Declares the settings of a kind of engine: their help, limits, and the values they may have."""

from __future__ import annotations

from dataclasses import field, fields
from functools import lru_cache
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
# of tensor_parallel, which our engine had
SPLIT_BY_VLLM: Final = (
    "is not a setting: vLLM splits a model over devices, by --engine vllm "
    "--engine-arg tensor-parallel-size=N (ops/guides/vllm.md)"
)


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


def field_problems(settings: Any) -> list[str]:
    """Return one sentence for each field that is none of its choices, or below its minimum."""
    found = []
    for name, allowed in choices(settings.__class__).items():
        if (value := getattr(settings, name)) not in allowed:
            found.append(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}")
    for item in fields(settings):
        value, minimum = getattr(settings, item.name), item.metadata["minimum"]
        if None not in (value, minimum) and value < minimum:
            limit = "not be negative" if minimum == 0 else f"be at least {minimum}"
            found.append(f"{item.name} must {limit}, not {value}")
    return found
