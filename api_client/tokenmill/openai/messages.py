"""Reads the messages of a chat as OpenAI's API, vLLM and Transformers write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tokenmill.openai.form_values import FormError, present, refuse_unknown, shown

_ROLES: Final = ("developer", "system", "user", "assistant", "tool")
_TEXTS: Final = ("name", "tool_call_id", "reasoning")
_KEYS: Final = ("role", "content", "refusal", "tool_calls", "reasoning_content", *_TEXTS)
# OpenAI's answers contain these keys with empty values, and a chat's history consists of answers
_UNSUPPORTED_KEYS: Final = ("function_call", "audio", "annotations")
_PART_KINDS: Final = ("text", "refusal")
_CALL_KEYS: Final = ("id", "type", "function", "index")


def read_messages(fields: dict[str, Any]) -> None:
    """Replace the messages by those of a job."""
    messages = fields["messages"]
    if not isinstance(messages, list | tuple):
        raise FormError(
            "messages must be a list of messages, each with role and content", "messages"
        )
    fields["messages"] = [
        _message(message, f"messages[{place}]") for place, message in enumerate(messages)
    ]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise FormError(f"{where} must be a message with role and content", where)
    given = present(message)
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise FormError(
            f"{where}.role must be one of {', '.join(_ROLES)}, not {shown(role)}", f"{where}.role"
        )
    for name in given:
        if name in _UNSUPPORTED_KEYS and given[name]:
            raise FormError(
                f"{where}.{name} is not supported here", f"{where}.{name}", "unsupported_parameter"
            )
    refuse_unknown(given, (*_KEYS, *_UNSUPPORTED_KEYS), where)
    read = {"role": role, **_texts(given, where), **_calls(given, where)}
    content = _said(given, role, where)
    if content is not None or not read.keys() & {"tool_calls", "reasoning"}:
        read["content"] = _content(content, where)
    return read


def _texts(given: dict[str, Any], where: str) -> dict[str, str]:
    """Return the members that are texts. Answers of vLLM name thoughts `reasoning_content`."""
    found: dict[str, str] = {name: given[name] for name in _TEXTS if name in given}
    if "reasoning_content" in given:
        found.setdefault("reasoning", given["reasoning_content"])
    for name, text in found.items():
        if not isinstance(text, str):
            raise FormError(f"{where}.{name} must be a text", f"{where}.{name}")
    return found


def _said(given: Mapping[str, Any], role: str, where: str) -> Any:
    """Return the content of a message. An assistant's refusal replaces its content."""
    content, refusal = given.get("content"), given.get("refusal")
    if refusal is None:
        return content
    if role != "assistant":
        raise FormError(f"{where}.refusal is an assistant's only", f"{where}.refusal")
    if content:
        raise FormError(
            f"{where} has a refusal beside its content: give one of them", f"{where}.refusal"
        )
    return refusal


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    """Return a text, or several parts of text. One part is the same as its text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise FormError(
            f"{where}.content must be a text or a list of text parts", f"{where}.content"
        )
    texts = [_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _PART_KINDS or not isinstance(part, Mapping):
        what = (
            f"is a part of type {shown(kind)}" if kind is not None else "is a part without a type"
        )
        raise FormError(
            f"{where} {what}; only text parts are supported", where, "unsupported_parameter"
        )
    given = present(part)
    refuse_unknown(given, ("type", kind), where)
    text = given.get(kind)
    if not isinstance(text, str):
        raise FormError(f"{where}.{kind} must be a text", f"{where}.{kind}")
    return text


def _calls(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    calls = given.get("tool_calls")
    if not calls:
        return {}
    if not isinstance(calls, list | tuple):
        raise FormError(f"{where}.tool_calls must be a list of calls", f"{where}.tool_calls")
    return {
        "tool_calls": [
            _call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)
        ]
    }


def _call(call: Any, where: str) -> dict[str, Any]:
    given = present(call) if isinstance(call, Mapping) else {}
    function = given.get("function")
    if not isinstance(function, Mapping) or given.get("type", "function") != "function":
        raise FormError(f"{where} must be the call of a function, with name and arguments", where)
    refuse_unknown(given, _CALL_KEYS, where)
    inner = present(function)
    refuse_unknown(inner, ("name", "arguments"), f"{where}.function")
    name, call_id = inner.get("name"), given.get("id", "")
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise FormError(f"{where} must have a name and an id that are texts", where)
    arguments = _arguments(inner.get("arguments", ""), f"{where}.function.arguments")
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> str:
    """Return the arguments as JSON text. Transformers writes them as an object; no text at all
    counts as no arguments.
    """
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    if isinstance(arguments, Mapping):
        try:
            return msgspec.json.encode(arguments).decode()
        except (TypeError, ValueError, OverflowError, RecursionError):
            pass  # refused below
    raise FormError(f"{where} must be a JSON object", where)
