"""Renders chats with the model's chat template, as `apply_chat_template` of Transformers does.

Templates are programs that model makers write. They differ in what they take, so two properties are
found by rendering a probe once: whether a content may be a list of parts, and whether it may be a
text. A chat is passed in a form that its template takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from tokenmill_schemas.chat import Message, Tool, ToolCall
from tokenmill_schemas.chat_validation import parsed_arguments

_PROBE: Final = "probe"
# Arguments of `apply_chat_template`; a variable of the template cannot have such a name.
_RESERVED: Final = frozenset({
    "add_generation_prompt", "chat", "chat_template", "continue_final_message", "conversation",
    "conversations", "documents", "max_length", "messages", "padding", "processor_kwargs",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
    "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip


class TemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages."""


class ChatTemplate:
    """The chat template of one model.

    Args:
        tokenizer: a tokenizer of Transformers.
        own: a template to use in place of the tokenizer's.
    """

    def __init__(self, tokenizer: Any, own: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._own = own

    @property
    def text(self) -> str:
        """The template's source; empty if the model has none. Of several templates, all."""
        found = self._own or getattr(self._tokenizer, "chat_template", None) or ""
        return "".join(map(str, found.values())) if isinstance(found, dict) else str(found)

    def render(
        self,
        messages: Sequence[Message],
        *,
        documents: Sequence[Mapping[str, str]] = (),
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        variables: Mapping[str, object] | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """Return the chat as the model reads it.

        Args:
            messages: the chat; valid as `schemas` checks it.
            documents: passed to the template where there are any.
            continue_final_message: end within the final message, so that the model continues it.
            add_generation_prompt: begin an assistant's message; None: unless the final message is
                continued.
            variables: further variables of the template.
            tools: passed to the template where there are any.

        Raises:
            TemplateError: with one sentence.
        """
        if not self.text:
            raise TemplateError("the model has no chat template: send a prompt instead of messages")
        reserved = sorted(_RESERVED & (variables or {}).keys())
        if reserved:
            raise TemplateError(f"chat_template_kwargs must not set {reserved[0]!r}")
        begins = not continue_final_message
        if add_generation_prompt is not None:
            begins = add_generation_prompt
        try:
            return self._apply(
                [self._turn(message) for message in messages],
                documents=[dict(document) for document in documents] or None,
                continue_final_message=continue_final_message,
                add_generation_prompt=begins,
                tools=[_tool(tool) for tool in tools] or None,
                **(variables or {}),
            )
        except Exception as error:  # templates are programs and may raise any error
            raise TemplateError(
                f"the model's chat template refuses the messages: {_first_line(error)}"
            ) from error

    def _apply(self, turns: list[dict[str, Any]], **arguments: Any) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                turns, chat_template=self._own, tokenize=False, **arguments
            )
        )

    def _turn(self, message: Message) -> dict[str, Any]:
        """Return the message as the template reads it. `developer` becomes `system` where the
        template does not know that role.
        """
        is_developer = message.role == "developer" and "developer" not in self.text
        turn: dict[str, Any] = {"role": "system" if is_developer else message.role}
        if message.content is not None:
            turn["content"] = self._content(message)
        turn |= {
            name: value
            for name in ("name", "tool_call_id")
            if (value := getattr(message, name)) is not None
        }
        if message.tool_calls:
            turn["tool_calls"] = [_call(call) for call in message.tool_calls]
        if message.reasoning is not None:  # each family reads another name
            names = ("reasoning", "reasoning_content", "thinking")
            turn |= dict.fromkeys(names, message.reasoning)
        return turn

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        takes_texts, takes_parts = self._takes
        if isinstance(message.content, tuple) and takes_parts:
            return [{"type": "text", "text": part.text} for part in message.content]
        if not takes_texts and takes_parts:
            return [{"type": "text", "text": message.text}]
        return message.text

    @cached_property
    def _takes(self) -> tuple[bool, bool]:
        """Return whether the template renders a text as content, and whether a list of parts."""
        part = {"type": "text", "text": _PROBE}
        return self._shows(_PROBE), self._shows([part]) and not self._shows([part], str([part]))

    def _shows(self, content: Any, expected: str = _PROBE) -> bool:
        try:
            return expected in self._apply([{"role": "user", "content": content}])
        except Exception:  # the template takes no such content
            return False


def _tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    given = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    found = {name: value for name, value in given.items() if value is not None}
    return {"type": tool.type, "function": found | ({"strict": True} if function.strict else {})}


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = parsed_arguments(call.function.arguments)
    return {
        "type": call.type,
        "id": call.id,
        "function": {"name": call.function.name, "arguments": arguments or {}},
    }


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    line = "".join(letter for letter in lines[0] if letter.isprintable()) if lines else ""
    return line[:300] or type(error).__name__
