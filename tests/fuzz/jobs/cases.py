"""One drawn job: how it is submitted, and how it is shown where it fails.

Half go through the client. The others are what a producer of another make sends: MessagePack of its
own, also with values that the client refuses and with bytes changed, to the submit script itself.
"""

from __future__ import annotations

import random
import reprlib
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgpack

from tests.fuzz.jobs.drawing import PARAMS, Arguments, draw_arguments
from tests.fuzz.jobs.texts import draw_text
from tests.fuzz.mutation import mutate, pack

_MOMENTS: Final = ("deadline", "not_before")
_PLACES: Final = (
    "id", "class", "tenant", "fingerprint", "idempotency key", "request", "created", "deadline",
    "due", "cost", "session",
)  # fmt: skip
_WILD: Final = (
    b"", b"\xff", b"-1", b"0", b"1e400", b"nan", b"inf", b"9007199254740993", b"0x10", b" ", b"a b",
    b"\0", b"x" * 2_000, b"{q}", b"interactive",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Job `number` of the run with this seed. A raw one goes to the script as it is."""

    seed: int
    number: int
    arguments: Arguments
    is_raw: bool = False
    cancel_after_s: float | None = None

    @classmethod
    def draw(cls, seed: int, number: int) -> Case:
        chance = random.Random(f"{seed}/{number}")
        is_raw = chance.random() < 0.5
        cancel_after_s = chance.uniform(0.0, 0.5) if chance.random() < 0.05 else None
        return cls(seed, number, draw_arguments(chance), is_raw, cancel_after_s)

    def client_arguments(self) -> Arguments:
        """Return the arguments of the client's `submit`."""
        arguments = dict(self.arguments)
        delay = arguments.get("not_before")
        if isinstance(delay, float) and abs(delay) < 1e6:
            arguments["not_before"] = timedelta(seconds=delay)
        return arguments

    def script_arguments(self) -> list[bytes]:
        """Return the arguments of the submit script: mostly as the client sends them, sometimes
        with changed bytes in the request or in one place.
        """
        chance = random.Random(f"{self.seed}/{self.number}/raw")
        fields = self._wire()
        request = _packed(fields)
        if chance.random() < 0.25:
            request = mutate(request, chance, [request])
        values = {
            "id": fields["job_id"],
            "class": fields.get("priority", "standard"),
            "tenant": fields.get("tenant", ""),
            "fingerprint": f"{self.seed}-{self.number}",
            "idempotency key": fields.get("idempotency_key", ""),
            "created": fields["created_ms"],
            "deadline": fields.get("deadline_ms", 0),
            "due": fields.get("not_before_ms", 0),
            "cost": 100,
            "session": fields.get("session", ""),
        }
        sent = {name: _bytes(value) for name, value in values.items()} | {"request": request}
        if chance.random() < 0.15:
            name = chance.choice(_PLACES)
            sent[name] = chance.choice((*_WILD, _bytes(draw_text(chance, 2))))
        return [sent[name] for name in _PLACES]

    def _wire(self) -> dict[str, Any]:
        now_ms = round(time.time() * 1000)
        given = {name: value for name, value in self.arguments.items() if name not in _MOMENTS}
        fields = {name: value for name, value in given.items() if name not in PARAMS}
        fields["params"] = {name: value for name, value in given.items() if name in PARAMS}
        fields.setdefault("job_id", f"raw-{self.seed}-{self.number}")
        fields["created_ms"] = now_ms
        for name in _MOMENTS:
            if (value := self.arguments.get(name)) is not None:
                fields[f"{name}_ms"] = _moment_ms(value, now_ms)
        return fields

    def __str__(self) -> str:
        """Show the job with long values cut, and the command that runs it alone."""
        how = "raw" if self.is_raw else "client"
        shown = ", ".join(f"{name}={_short(value)}" for name, value in self.arguments.items())
        again = f"ops/fuzz jobs --seed {self.seed} --first {self.number} --count 1"
        return f"job {self.number} ({how}): {shown}\n    {again}"


def _moment_ms(value: Any, now_ms: int) -> Any:
    if isinstance(value, float) and abs(value) < 1e9:
        return now_ms + round(value * 1000)
    return value


def _packed(fields: dict[str, Any]) -> bytes:
    try:
        return pack(fields)
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.PackException):
        return pack(_within_64_bits(fields))


def _within_64_bits(value: Any, depth: int = 0) -> Any:
    """MessagePack has no larger numbers, and its packer nests no deeper than 511."""
    if isinstance(value, dict) and depth < 400:
        return {key: _within_64_bits(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple) and depth < 400:
        return [_within_64_bits(item, depth + 1) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-(2**63), min(value, 2**64 - 1))
    return None if isinstance(value, dict | list | tuple) else value


def _bytes(value: Any) -> bytes:
    words = value if isinstance(value, str) else _short(value)
    return words.encode("utf-8", "surrogatepass")


_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 300
_shortened.maxlong = 40
_shortened.maxlevel = 8
_short: Final = _shortened.repr
