"""Reads what a command takes as a prompt or as JSON: arguments, files after `@`, standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest
from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES


def prompt_of(
    prompt: str | None,
    is_chat: bool,
    system: str | None,
    messages: str | None,
    prompt_ids: str | None,
) -> dict[str, Any]:
    if sum(value is not None for value in (prompt, messages, prompt_ids)) > 1:
        raise InvalidRequest(["give one of PROMPT, --messages and --prompt-ids"])
    if messages is not None:
        return {"messages": from_json(messages, "--messages")}
    if prompt_ids is not None:
        try:
            return {"prompt_ids": [int(word) for word in prompt_ids.replace(",", " ").split()]}
        except ValueError as error:
            raise InvalidRequest(
                ["--prompt-ids must be whole numbers, separated by commas"]
            ) from error
    text = _stdin() if prompt in (None, "-") else str(prompt)
    if not is_chat:
        return {"prompt": text}
    turns = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*turns, {"role": "user", "content": text}]}


def _stdin() -> str:
    if sys.stdin.isatty():
        raise InvalidRequest(["give a prompt, as an argument or on stdin"])
    return _within_bounds(sys.stdin.read(MAX_PAYLOAD_BYTES + 1), "the prompt").rstrip("\n")


def _within_bounds(text: str, what: str) -> str:
    """Return the text. Raises InvalidRequest above the largest request of any queue; an endless
    input would fill the memory.
    """
    if len(text) > MAX_PAYLOAD_BYTES:
        raise InvalidRequest([f"{what} has more than {MAX_PAYLOAD_BYTES} characters"])
    return text


def text_of(value: str, option: str) -> str:
    """Return the value, or after `@` the contents of the file that it names."""
    if not value.startswith("@"):
        return value
    try:
        with Path(value[1:]).open(encoding="utf-8") as file:
            return _within_bounds(file.read(MAX_PAYLOAD_BYTES + 1), f"{option}: {value[1:]}")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest([f"{option}: cannot read {value[1:]}: {error}"]) from error


def from_json(value: str, option: str) -> Any:
    try:
        return msgspec.json.decode(text_of(value, option))
    except msgspec.DecodeError as error:
        raise InvalidRequest([f"{option} is not JSON: {error}"]) from error
