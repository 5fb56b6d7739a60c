"""Reads what a result has beside its tokens and texts: reasons, thoughts, tool calls,
log-probabilities. Results are read as plain MessagePack; nothing of the worker is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

TOLERANCE = 1e-3  # of a log-probability: another batch sums in another order

Call = tuple[str, str]  # name, arguments


@dataclass(frozen=True, slots=True)
class Details:
    """Each field has one entry per choice, but `prompt`."""

    reasons: tuple[str, ...]
    thoughts: tuple[str, ...]
    calls: tuple[tuple[Call, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    prompt: tuple[float, ...] = ()

    @classmethod
    def read(cls, result: bytes) -> Details:
        """Read an encoded JobResult."""
        decoded = msgspec.msgpack.decode(bytes(result))
        choices = decoded.get("choices", ())
        scored = decoded.get("prompt") or {}
        return cls(
            tuple(choice.get("finish_reason") or "" for choice in choices),
            tuple(choice.get("reasoning", "") for choice in choices),
            tuple(
                tuple((call["name"], call["arguments"]) for call in choice.get("tool_calls", ()))
                for choice in choices
            ),
            tuple(_numbers(choice.get("logprobs")) for choice in choices),
            _numbers(scored.get("logprobs")),
        )

    def differences(self, other: Details) -> Iterator[str]:
        """Yield the name of each field that differs."""
        for name in ("reasons", "thoughts", "calls"):
            if getattr(self, name) != getattr(other, name):
                yield name
        if not _all_near(self.logprobs, other.logprobs):
            yield "logprobs"
        if not _all_near((self.prompt,), (other.prompt,)):
            yield "prompt's logprobs"


def _numbers(entries: Any) -> tuple[float, ...]:
    """Return each token's log-probability, and those of the most likely tokens beside it."""
    found: list[float] = []
    for entry in entries or ():
        found.append(entry[0])
        found += [value for _, value in (entry[1] if len(entry) > 1 else ())]
    return tuple(found)


def _all_near(first: tuple[tuple[float, ...], ...], second: tuple[tuple[float, ...], ...]) -> bool:
    if [len(numbers) for numbers in first] != [len(numbers) for numbers in second]:
        return False
    return all(
        one == other or abs(one - other) <= TOLERANCE
        for numbers, others in zip(first, second, strict=True)
        for one, other in zip(numbers, others, strict=True)
    )
