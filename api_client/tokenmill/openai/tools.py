"""Reads the tools of a chat, and which of them the model may call, as OpenAI's API writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenmill.openai.form_values import FormError, present, refuse_unknown, shown

_FUNCTION_KEYS: Final = ("name", "description", "parameters", "strict")
_MODES: Final = ("auto", "none", "required")


def read_tools(fields: dict[str, Any]) -> None:
    """Replace the tools by those of a job."""
    tools = fields["tools"]
    if not isinstance(tools, list | tuple):
        raise FormError("tools must be a list of functions", "tools")
    fields["tools"] = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]


def read_tool_choice(fields: dict[str, Any]) -> None:
    """Replace a chosen function by its name. Without tools, a choice of none is left out."""
    choice = fields["tool_choice"]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        _allow(fields, choice)
    elif isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type", "function") != "function" or not isinstance(name, str):
            raise FormError(
                f"tool_choice must name a function, not {shown(dict(choice))}", "tool_choice"
            )
        refuse_unknown(present(choice), ("type", "function"), "tool_choice")
        fields["tool_choice"] = f"function:{name}"
    elif not isinstance(choice, str) or not (choice in _MODES or choice.startswith("function:")):
        raise FormError(
            f"tool_choice must be auto, none, required or a function, not {shown(choice)}",
            "tool_choice",
        )


def _allow(fields: dict[str, Any], choice: Mapping[str, Any]) -> None:
    """Leave the tools that the choice allows: the model sees no other."""
    where = "tool_choice.allowed_tools"
    refuse_unknown(present(choice), ("type", "allowed_tools"), "tool_choice")
    allowed = choice.get("allowed_tools")
    given = present(allowed) if isinstance(allowed, Mapping) else {}
    refuse_unknown(given, ("mode", "tools"), where)
    mode, named = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required"):
        raise FormError(f"{where}.mode must be auto or required", f"{where}.mode")
    if not isinstance(named, list | tuple) or not named:
        raise FormError(f"{where}.tools must be a list of functions", f"{where}.tools")
    names = [
        _tool(tool, f"{where}.tools[{place}]")["function"]["name"]
        for place, tool in enumerate(named)
    ]
    tools = {tool["function"]["name"]: tool for tool in fields.get("tools") or ()}
    for name in names:
        if name not in tools:
            raise FormError(f"tool_choice names {shown(name)}, which is no tool", "tool_choice")
    fields["tools"] = [tool for name, tool in tools.items() if name in names]
    fields["tool_choice"] = mode


def _tool(tool: Any, where: str) -> dict[str, Any]:
    given = present(tool) if isinstance(tool, Mapping) else {}
    function = given.get("function")
    if not isinstance(function, Mapping) or given.get("type", "function") != "function":
        raise FormError(f"{where} must be a function, with a name and parameters", where)
    refuse_unknown(given, ("type", "function"), where)
    inner = present(function)
    refuse_unknown(inner, _FUNCTION_KEYS, f"{where}.function")
    if not isinstance(inner.get("name"), str):
        raise FormError(f"{where}.function.name must be a text", f"{where}.function.name")
    if not isinstance(inner.get("parameters", {}), Mapping):
        raise FormError(
            f"{where}.function.parameters must be a JSON schema", f"{where}.function.parameters"
        )
    return {"function": inner}
