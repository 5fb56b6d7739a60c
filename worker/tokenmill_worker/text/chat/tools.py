"""Describes how each family writes tool calls.

From one description come the grammar that the engine binds and the parser that reads the answer
(call_parser.py), so they cannot disagree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tokenmill_schemas.chat import Tool
from tokenmill_schemas.chat_validation import NAMED
from tokenmill_schemas.generation import ArgumentForm, CallableTool, CallGrammar

_NO_ARGUMENTS: Final[dict[str, object]] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The texts around the calls of one family; see CallGrammar. `id_chars`: the length of a call's
    id that its template takes.
    """

    trigger: str
    before: str
    after: str
    end: str
    separator: str | None = None
    closing: str = ""
    id_chars: int = 24
    arguments: ArgumentForm | None = None
    at_start: bool = False
    asides: tuple[str, ...] = ()
    aside_end: str = ""
    answer: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        parts = (self.trigger, self.before, self.after, self.end, self.separator, self.closing)
        heads = (*self.asides, self.aside_end, self.answer)
        return tuple(part for part in (*parts, *heads) if part)


HERMES: Final = ToolFormat(
    trigger="<tool_call>",
    before='\n{"name": "',
    after='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n<tool_call>",
)
LLAMA3: Final = ToolFormat(trigger='{"name": "', before="", after='", "parameters": ', end="}")
MISTRAL_LIST: Final = ToolFormat(
    trigger="[TOOL_CALLS][",
    before='{"name": "',
    after='", "arguments": ',
    end="}",
    separator=", ",
    closing="]",
    id_chars=9,
)
MISTRAL: Final = ToolFormat(
    trigger="[TOOL_CALLS]",
    before="",
    after="[ARGS]",
    end="",
    separator="[TOOL_CALLS]",
    id_chars=9,
)
DEEPSEEK: Final = ToolFormat(
    trigger="<｜tool▁calls▁begin｜>",
    before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    after="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    separator="\n",
    closing="<｜tool▁calls▁end｜>",
)
DEEPSEEK_V3: Final = ToolFormat(
    trigger="<｜tool▁calls▁begin｜>",
    before="<｜tool▁call▁begin｜>",
    after="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    separator="",
    closing="<｜tool▁calls▁end｜>",
)
XML: Final = ToolFormat(
    trigger="<tool_call>",
    before="\n<function=",
    after=">\n",
    end="</function>\n</tool_call>",
    separator="\n<tool_call>",
    arguments=ArgumentForm(
        before="<parameter=", after=">\n", end="\n</parameter>\n", has_plain_texts=True
    ),
)
PYTHONIC: Final = ToolFormat(
    trigger="[",
    before="",
    after="(",
    end=")",
    separator=", ",
    closing="]",
    at_start=True,
    arguments=ArgumentForm(
        after="=", separator=", ", words={"true": "True", "false": "False", "null": "None"}
    ),
)
CHANNELS: Final = ToolFormat(
    trigger="<|channel|>commentary to=functions.",
    before="",
    after=" <|constrain|>json<|message|>",
    end="",
    asides=("<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"),  # thoughts first
    aside_end="<|end|><|start|>assistant",
    answer="<|channel|>final<|message|>",
)
_BY_NAME: Final = {
    "hermes": (HERMES,),
    "llama3": (LLAMA3,),
    "mistral": (MISTRAL, MISTRAL_LIST),
    "deepseek": (DEEPSEEK, DEEPSEEK_V3),
    "xml": (XML,),
    "pythonic": (PYTHONIC,),
    "channels": (CHANNELS,),
}
# what a template of the family says and templates of others do not
_SIGNS: Final = (
    ("channels", "<|channel|>"),
    ("deepseek", "<｜tool▁calls▁begin｜>"),
    ("mistral", "[TOOL_CALLS]"),
    ("xml", "<parameter="),
    ("pythonic", "func_name1(params_name1="),
    ("llama3", '"parameters": '),
    ("hermes", "<tool_call>"),
)
_UNKNOWN: Final = "<function="  # JSON in a tag that names the function


def detect_tools(template: str, wanted: str) -> ToolFormat | None:
    """Return the format of a model's calls; None if it has none that is known.

    Args:
        template: the text of the chat template.
        wanted: the worker's setting `tool_format`: "auto" reads the template, a name takes that
            family, "none" takes none.
    """
    if wanted == "none" or "tools" not in template:
        return None
    name = wanted
    if wanted == "auto":
        name = next((family for family, sign in _SIGNS if sign in template), "")
        if name != "xml" and _UNKNOWN in template:
            return None
    found = _BY_NAME.get(name)
    if found is None:
        return None
    if found[0] is MISTRAL and "[ARGS]" not in template:
        spaced = "[TOOL_CALLS] [" in template
        return replace(MISTRAL_LIST, trigger="[TOOL_CALLS] [") if spaced else MISTRAL_LIST
    if found[0] is DEEPSEEK and "```json" not in template:
        return DEEPSEEK_V3
    return found[0]


def special_marks(tokenizer: Any, form: ToolFormat) -> dict[str, int]:
    """Return the special tokens inside the texts of a format, which have no text of their own."""
    added = tokenizer.added_tokens_decoder.items()
    return {
        token.content: token_id
        for token_id, token in added
        if token.special and any(token.content in text for text in form.texts)
    }


def call_grammar(
    form: ToolFormat,
    marks: dict[str, int],
    tools: Sequence[Tool],
    choice: str,
    is_parallel: bool,
    *,
    has_schema: bool = False,
) -> CallGrammar:
    """Return the form of the answers to one request; its tools are valid.

    Args:
        form: of the model's calls.
        marks: the special tokens inside its texts.
        tools: those that may be called.
        choice: `tool_choice` of the request.
        is_parallel: whether an answer may call more than once.
        has_schema: an answer without calls keeps a JSON schema, so there is no text before a call.
    """
    named = choice.removeprefix(NAMED) if choice.startswith(NAMED) else None
    callable_ = tuple(
        CallableTool(
            tool.function.name,
            _NO_ARGUMENTS
            if tool.function.parameters is None
            else {"type": "object", **tool.function.parameters},
            tool.function.strict,
        )
        for tool in tools
        if named in (None, tool.function.name)
    )
    return CallGrammar(
        trigger=form.trigger,
        before=form.before,
        after=form.after,
        end=form.end,
        tools=callable_,
        separator=form.separator if is_parallel and named is None else None,
        closing=form.closing,
        marks=marks,
        is_required=named is not None or choice == "required",
        arguments=form.arguments,
        at_start=form.at_start or (has_schema and not form.asides),
        asides=form.asides[:1] if has_schema else form.asides,
        aside_end=form.aside_end,
        answer=form.answer,
    )


def call_ids(job_id: str, choice: int, num_chars: int) -> Callable[[int], str]:
    """Return a function that gives the id of each call of a choice. Another worker that resumes the
    job gives the same ids.
    """

    def id_of(index: int) -> str:
        digest = hashlib.blake2b(f"{job_id}/{choice}/{index}".encode(), digest_size=16)
        return digest.hexdigest()[:num_chars]

    return id_of
