"""Converts the body of a request to OpenAI's Responses API to the body of the chat that it means.

A parameter that would change the answer and is not supported is refused by its name; labels are
ignored. There is no store of responses, so a response that goes on from another one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenmill.openai.form_values import FormError, present, refuse_unknown, shown
from tokenmill.openai.parameters import (
    LABELS,
    SAMPLING,
    SESSION,
    VLLM_NEUTRAL,
    refuse_effect,
    require,
    unrecognized,
)

# names that mean the same in a chat
PASSED: Final = frozenset({
    *SAMPLING, *VLLM_NEUTRAL, *LABELS, SESSION, "model", "parallel_tool_calls",
    "chat_template_kwargs", "stream", "stream_options",
})  # fmt: skip
# parameter → the values that have no effect
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": (),
    "moderation": (),
}
_LOGPROBS: Final = "message.output_text.logprobs"
_TEXT_KINDS: Final = ("input_text", "output_text", "text", "refusal", "reasoning_text")
_MESSAGE_KEYS: Final = ("type", "role", "content", "id", "status", "phase")
_ITEM_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "function_call": ("type", "call_id", "name", "arguments", "id", "status"),
    "function_call_output": ("type", "call_id", "output", "id", "status"),
    "reasoning": ("type", "summary", "content", "id", "status"),
}


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat. It has no member whose value is null. Raises FormError."""
    body = present(body)
    require(body, "input")
    chat: dict[str, Any] = {"messages": _messages(body)}
    for name, value in body.items():
        if name in _READERS:
            chat |= _READERS[name](value)
        elif name in PASSED:
            chat[name] = value
        elif name in NEUTRAL:
            refuse_effect(name, value, NEUTRAL[name])
        elif name not in ("input", "instructions"):
            raise unrecognized(name)
    if "top_logprobs" in chat:
        chat["logprobs"] = True
    return chat


# ── input ──


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    instructions, given = body.get("instructions"), body["input"]
    if not isinstance(instructions, str | None):
        raise FormError("instructions must be a text", "instructions")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise FormError("input must be a text or a list of items", "input")
    for place, item in enumerate(given):
        _add(messages, item, f"input[{place}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Add an item. Thoughts, text and calls of an assistant that follow each other are one
    message.
    """
    given = present(item) if isinstance(item, Mapping) else {}
    kind = given.get("type", "message")
    if kind == "message":
        if "role" not in given:
            raise FormError(f"{where} must be an item with a type, or with role and content", where)
        refuse_unknown(given, _MESSAGE_KEYS, where)
        said = {"role": given["role"], "content": _content(given.get("content"), where)}
        _join(messages, said) if said["role"] == "assistant" else messages.append(said)
        return
    if not isinstance(kind, str) or kind not in _ITEM_KEYS:
        raise FormError(
            f"{where} is an item of type {shown(kind)}; messages, function calls, their outputs "
            "and reasoning are supported",
            where,
            "unsupported_parameter",
        )
    refuse_unknown(given, _ITEM_KEYS[kind], where)
    if kind == "function_call_output":
        output = _content(given.get("output"), where)
        called = given.get("call_id")
        messages.append({"role": "tool", "tool_call_id": called, "content": output})
    elif kind == "function_call" and given.get("status") != "incomplete":  # a cut one is no call
        function = {name: given[name] for name in ("name", "arguments") if name in given}
        _join(messages, {"tool_calls": [{"id": given.get("call_id"), "function": function}]})
    elif kind == "reasoning":
        thoughts = _content(given.get("content") or given.get("summary") or [], where)
        if not isinstance(thoughts, list):
            raise FormError(f"{where} must have its thoughts in a list of parts", where)
        if thoughts:
            _join(messages, {"reasoning": "".join(part["text"] for part in thoughts)})


def _join(messages: list[dict[str, Any]], said: dict[str, Any]) -> None:
    """Add to the assistant's message that is last, where its order stays thoughts, text, calls."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
    if "tool_calls" in said and last:
        last["tool_calls"] = [*last.get("tool_calls", ()), *said["tool_calls"]]
    elif "content" in said and last.keys() == {"role", "reasoning"}:
        last["content"] = said["content"]
    else:
        messages.append({**said, "role": "assistant"})


def _content(content: Any, where: str) -> Any:
    """Return a content with its parts as a chat writes them; messages check what is no text."""
    if not isinstance(content, list):
        return content
    return [_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in (*_TEXT_KINDS, "summary_text"):
        raise FormError(
            f"{where} is a part of type {shown(kind)}; only text parts are supported",
            where,
            "unsupported_parameter",
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise FormError(f"{where} must have a text", where)
    return {"type": "text", "text": text}


# ── parameters ──


def _length(value: Any) -> dict[str, Any]:
    return {"max_completion_tokens": value}


def _text(value: Any) -> dict[str, Any]:
    """Read the format of the answer: the members of a JSON schema's envelope stand beside its
    type.
    """
    given = _object(value, ("format", "verbosity"), "text")
    wanted = given.pop("format", None)
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
        inner = {name: wanted[name] for name in wanted if name != "type"}
        wanted = {"type": "json_schema", "json_schema": inner}
    return {**given, **({} if wanted is None else {"response_format": wanted})}


def _reasoning(value: Any) -> dict[str, Any]:
    """Read the effort. A summary is not made: the answer has the thoughts themselves."""
    given = _object(value, ("effort", "summary", "generate_summary"), "reasoning")
    return {"reasoning_effort": given["effort"]} if "effort" in given else {}


def _include(value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or any(name != _LOGPROBS for name in value):
        raise FormError(f"include may hold {_LOGPROBS} alone", "include", "unsupported_parameter")
    return {"logprobs": True} if value else {}


def _tools(value: Any) -> dict[str, Any]:
    """Read tools, whose function's members stand beside their type."""
    if not isinstance(value, list):
        return {"tools": value}
    return {"tools": [_function(tool) for tool in value]}


def _choice(value: Any) -> dict[str, Any]:
    """Read a choice; the mode and the tools of allowed ones stand beside their type."""
    if not isinstance(value, Mapping) or value.get("type") != "allowed_tools":
        return {"tool_choice": _function(value)}
    inner = {name: value[name] for name in value if name != "type"}
    if isinstance(inner.get("tools"), list):
        inner["tools"] = [_function(tool) for tool in inner["tools"]]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": inner}}


def _function(value: Any) -> Any:
    """Return a function as a chat writes it; another value as it is, for the chat to refuse."""
    if not isinstance(value, Mapping) or value.get("type") != "function":
        return value
    return {
        "type": "function",
        "function": {name: value[name] for name in value if name != "type"},
    }


def _top_logprobs(value: Any) -> dict[str, Any]:
    return {} if value == 0 and type(value) is int else {"top_logprobs": value}


def _object(value: Any, keys: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise FormError(f"{where} must be an object", where)
    given = present(value)
    refuse_unknown(given, keys, where)
    return given


_READERS: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "max_output_tokens": _length,
    "text": _text,
    "reasoning": _reasoning,
    "include": _include,
    "tools": _tools,
    "tool_choice": _choice,
    "top_logprobs": _top_logprobs,
}
TAKEN: Final = (PASSED - VLLM_NEUTRAL.keys() | _READERS.keys() | {"input", "instructions"}) - {
    "stream",
    "stream_options",
}
