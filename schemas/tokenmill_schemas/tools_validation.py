"""Checks the tools of a request, without a model."""

import re
from collections.abc import Iterator
from typing import Final

from tokenmill_schemas.chat import Tool
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.params_validation import MAX_FORMAT_DEPTH, encoded_size, too_deep
from tokenmill_schemas.size_limits import MAX_FORMAT_CHARS, MAX_TOOLS

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
