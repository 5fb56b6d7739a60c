"""The messages of a chat, and the tools that the model may call."""

from typing import Literal

import msgspec


class TextPart(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    text: str
    type: Literal["text"] = "text"


class FunctionCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """The function that an assistant called. `arguments` is a JSON object, as text."""

    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of an assistant's message."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class ToolFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments; None:
    it takes none. `strict`: refuse a schema that cannot be enforced; else enforce what can.
    """

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool = False


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    function: ToolFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a chat.

    `content` is a text, or several parts of text. An assistant's message may have `tool_calls` and
    `reasoning` (its thoughts); then `content` may be missing. `tool_call_id` names the call that a
    tool's message answers.
    """

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        """The content as one text: its parts are joined without a separator."""
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def num_chars(self) -> int:
        """The characters of the content, the thoughts and the calls."""
        calls = sum(len(c.function.name) + len(c.function.arguments) for c in self.tool_calls)
        return len(self.text) + len(self.reasoning or "") + calls
