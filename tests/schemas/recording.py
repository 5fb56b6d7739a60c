"""Records this version's messages for all later ones: `python -m tests.schemas.recording VERSION`.

One `.msgpack` per message of samples.py; `values.json`, what each of them means; `enums.json`,
every word of every enumeration; written by hand, `queue.json`, a queue key by key. What is recorded
stays as it is, and new samples are added to it: a test that fails against a recording shows that
running systems would break.
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Any

import msgspec

import tokenmill_schemas
from tests.schemas.samples import SAMPLES
from tokenmill_schemas.codec import encode

FOLDER = Path(__file__).parent / "recorded"


def meaning(value: object) -> Any:
    """Return a message as plain values, as they are in JSON."""
    return msgspec.json.decode(msgspec.json.encode(value))


def enumerations() -> dict[str, list[str]]:
    found = {
        name: value for name, value in vars(tokenmill_schemas).items() if isinstance(value, type)
    }
    return {
        name: [member.value for member in kind]
        for name, kind in sorted(found.items())
        if issubclass(kind, enum.StrEnum)
    }


def differences(name: str, data: bytes, kind: object, meant: Any) -> list[str]:
    """Return what reading a recorded message loses or changes; an empty list if nothing."""
    try:
        read = msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        return [f"{name} cannot be read any more: {error}"]
    return _missing(name, meant, meaning(read))


def _missing(place: str, recorded: Any, now: Any) -> list[str]:
    if isinstance(recorded, dict) and isinstance(now, dict):
        lost = [f"{place}.{key} is gone" for key in recorded.keys() - now.keys()]
        both = sorted(recorded.keys() & now.keys())
        return sorted(lost) + [
            line for key in both for line in _missing(f"{place}.{key}", recorded[key], now[key])
        ]
    if isinstance(recorded, list) and isinstance(now, list):
        is_entry = ".logprobs" in place and isinstance(next(iter(recorded), None), float)
        if len(recorded) == len(now) or (is_entry and len(recorded) < len(now)):  # it grows
            return [
                line
                for index, (old, new) in enumerate(zip(recorded, now, strict=False))
                for line in _missing(f"{place}[{index}]", old, new)
            ]
    return [] if recorded == now else [f"{place} was {recorded!r} and is {now!r}"]


def main(version: str) -> None:
    folder = FOLDER / version
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "values.json"
    values = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    for name, (value, _) in SAMPLES.items():
        if name in values:
            continue
        (folder / f"{name}.msgpack").write_bytes(encode(value))
        values[name] = meaning(value)
    for name, content in (("values", values), ("enums", enumerations())):
        (folder / f"{name}.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
        )


if __name__ == "__main__":
    main(sys.argv[1])
