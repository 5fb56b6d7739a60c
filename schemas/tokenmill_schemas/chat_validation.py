"""Checks messages, tools and what goes with them to the chat template, without a template."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from tokenmill_schemas.chat import Message, Tool
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.params_validation import MAX_FORMAT_DEPTH, encoded_size, too_deep
from tokenmill_schemas.size_limits import MAX_DOCUMENTS, MAX_FORMAT_CHARS, MAX_TOOLS

_TEMPLATE_FIELDS: Final = ("chat_template_kwargs", "documents", "continue_final_message")


def chat_texts(request: JobRequest) -> Iterator[tuple[str, str]]:
    """Yield each text of the chat, after the name of its field."""
    for i, message in enumerate(request.messages or ()):
        where = f"messages[{i}]"
        content = message.content
        if isinstance(content, tuple):
            yield from ((f"{where}.content[{j}]", part.text) for j, part in enumerate(content))
        elif content is not None:
            yield f"{where}.content", content
        for name in ("name", "tool_call_id", "reasoning"):
            text = getattr(message, name)
            if text is not None:
                yield f"{where}.{name}", text
        for j, call in enumerate(message.tool_calls):
            for text in (call.id, call.function.name, call.function.arguments):
                yield f"{where}.tool_calls[{j}]", text
    yield from (("documents", text) for text in json_texts(request.documents))
    yield from _tool_texts(request)
    kwargs = request.chat_template_kwargs
    yield from (("chat_template_kwargs", text) for text in json_texts(kwargs))


def _tool_texts(request: JobRequest) -> Iterator[tuple[str, str]]:
    for i, tool in enumerate(request.tools):
        function = tool.function
        texts = (function.name, function.description or "", *json_texts(function.parameters))
        yield from ((f"tools[{i}]", text) for text in texts)
    yield "tool_choice", request.tool_choice


def json_texts(value: object, depth: int = 0) -> Iterator[str]:
    """Yield the keys and values of nested JSON that are texts. Values nested deeper than the limit
    are left out; another check rejects them.
    """
    if isinstance(value, str):
        yield value
    elif depth <= MAX_FORMAT_DEPTH and isinstance(value, Mapping):
        for key, item in value.items():
            yield from json_texts(key, depth + 1)
            yield from json_texts(item, depth + 1)
    elif depth <= MAX_FORMAT_DEPTH and isinstance(value, list | tuple):
        for item in value:
            yield from json_texts(item, depth + 1)


def chat_problems(request: JobRequest) -> Iterator[str]:
    """Yield one sentence for each problem of the messages and of the template's arguments."""
    known: set[str] = set()
    for i, message in enumerate(request.messages or ()):
        yield from _message_problems(message, f"messages[{i}]", known)
        known.update(call.id for call in message.tool_calls if call.id)
    if request.messages is None:
        yield from (f"{name} needs messages" for name in _TEMPLATE_FIELDS if getattr(request, name))
        if request.add_generation_prompt is not None:
            yield "add_generation_prompt needs messages"
    if request.continue_final_message:
        yield from _continuation_problems(request)
    if len(request.documents) > MAX_DOCUMENTS:
        yield f"documents may have {MAX_DOCUMENTS} entries, not {len(request.documents)}"
    yield from _kwargs_problems(request.chat_template_kwargs)


def _message_problems(message: Message, where: str, known: set[str]) -> Iterator[str]:
    if message.role != "assistant":
        yield from (
            f"{where}.{name} is an assistant's only"
            for name in ("tool_calls", "reasoning")
            if getattr(message, name)
        )
        if message.content is None:
            yield f"{where}.content must be a text or a list of text parts"
    elif message.content is None and not message.tool_calls and message.reasoning is None:
        yield f"{where} has neither content nor tool_calls"
    if message.tool_call_id is not None:
        if message.role != "tool":
            yield f"{where}.tool_call_id is a tool's only"
        elif message.tool_call_id not in known:
            shown = message.tool_call_id[:60]
            yield f"{where}.tool_call_id is {shown!r}, which no message before it called"
    for j, call in enumerate(message.tool_calls):
        inside = f"{where}.tool_calls[{j}].function"
        if not call.function.name:
            yield f"{inside}.name must not be empty"
        if parsed_arguments(call.function.arguments) is None:
            yield f"{inside}.arguments must be a JSON object, as text"


def parsed_arguments(text: str) -> dict[str, object] | None:
    """Return the arguments of a call; None if the text is no JSON object."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _continuation_problems(request: JobRequest) -> Iterator[str]:
    if request.add_generation_prompt:
        yield (
            "continue_final_message continues the final message, and add_generation_prompt begins "
            "another: give one of them"
        )
    if request.messages and request.messages[-1].content in (None, ()):
        yield "continue_final_message needs a final message with content"


def _kwargs_problems(kwargs: dict[str, object]) -> Iterator[str]:
    if too_deep(kwargs, MAX_FORMAT_DEPTH):
        yield f"chat_template_kwargs is nested deeper than {MAX_FORMAT_DEPTH} levels"
        return
    size = encoded_size(kwargs)
    if size is None:
        yield "chat_template_kwargs holds a number beyond 64 bits"
    elif size > MAX_FORMAT_CHARS:
        yield f"chat_template_kwargs may have {MAX_FORMAT_CHARS} bytes, not {size}"


NAMED: Final = "function:"  # before the name, in `tool_choice`
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_MODES: Final = ("auto", "none", "required")


def tool_problems(request: JobRequest) -> Iterator[str]:
    """Yield one sentence for each problem of the tools."""
    if len(request.tools) > MAX_TOOLS:
        yield f"tools may have {MAX_TOOLS} entries, not {len(request.tools)}"
        return
    if request.tools and request.messages is None:
        yield "tools needs messages"
    names: set[str] = set()
    for i, tool in enumerate(request.tools):
        yield from _problems_of_one(tool, f"tools[{i}].function", names)
        names.add(tool.function.name)
    yield from _choice_problems(request, names)
    if not too_deep([tool.function.parameters for tool in request.tools], MAX_FORMAT_DEPTH + 1):
        size = encoded_size(request.tools)
        if size is None:
            yield "tools holds a number beyond 64 bits"
        elif size > MAX_FORMAT_CHARS:
            yield f"tools may have {MAX_FORMAT_CHARS} bytes, not {size}"


def _problems_of_one(tool: Tool, where: str, names: set[str]) -> Iterator[str]:
    function = tool.function
    if not _NAME.fullmatch(function.name):
        yield (
            f"{where}.name must have 1 to 64 letters, digits, '_', '.' or '-', not "
            f"{function.name[:80]!r}"
        )
    elif function.name in names:
        yield f"{where}.name is {function.name!r}, which another tool has"
    parameters = function.parameters
    if parameters is None:
        return
    if too_deep(parameters, MAX_FORMAT_DEPTH):
        yield f"{where}.parameters is nested deeper than {MAX_FORMAT_DEPTH} levels"
    elif parameters.get("type", "object") != "object":
        yield f"{where}.parameters must be the JSON schema of an object"


def _choice_problems(request: JobRequest, names: set[str]) -> Iterator[str]:
    choice = request.tool_choice
    if choice.startswith(NAMED):
        if choice.removeprefix(NAMED) not in names:
            yield f"tool_choice names {choice.removeprefix(NAMED)[:64]!r}, which is no tool"
    elif choice not in _MODES:
        yield f"tool_choice must be auto, none, required or a function, not {choice[:64]!r}"
    elif choice == "required" and not request.tools:
        yield "tool_choice is 'required', but there are no tools"
    wanted = request.params.response_format
    if request.tools and choice != "none" and wanted is not None and wanted.json_schema is None:
        yield "response_format cannot be given together with tools, unless it is a json_schema"
