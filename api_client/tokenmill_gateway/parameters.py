"""Says which parameters of a body are honoured, accepted as labels, or refused, and their types.

`/openapi.json` and the table in ops/guides/openai-parameters.md are made from it. What a parameter
does is decided where it is read: tokenmill/openai for all producers, and the handlers here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec
from msgspec import Meta

from tokenmill.openai.parameters import LABELS
from tokenmill.openai.request_body import parameters_of
from tokenmill_gateway.submission import TIERS
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.openai import CHAT_URL, COMPLETIONS_URL, RESPONSES_URL
from tokenmill_schemas.validation import MAX_NAME_CHARS

Manner = Literal["honoured", "accepted", "refused"]

_STREAM: Final = frozenset({"stream", "stream_options", "service_tier"})
# what the gateway does beside the parameters that make a job
_OWN: Final[Mapping[str, frozenset[str]]] = {
    CHAT_URL: _STREAM,
    COMPLETIONS_URL: _STREAM,
    RESPONSES_URL: _STREAM
    | {"background", "background_options", "previous_response_id", "store", "metadata"},
}


class ChatInput(msgspec.Struct, kw_only=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


_Object = dict[str, Any]
_Objects = list[dict[str, Any]]
_Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=64)],
        Annotated[str, Meta(max_length=512)],
    ],
    Meta(max_length=16),
]
_TYPES: Final[Mapping[str, Any]] = {
    **get_type_hints(SamplingParams),  # as far as no row below has the name
    "add_generation_prompt": bool,
    "background": bool,
    "background_options": _Object,
    "best_of": int,
    "chat_template_kwargs": _Object,
    "continue_final_message": bool,
    "documents": _Objects,
    "include": list[Literal["message.output_text.logprobs"]],
    "input": str | _Objects,
    "instructions": str,
    "logit_bias": dict[str, float],
    "max_completion_tokens": int,
    "max_output_tokens": int,
    "messages": Annotated[list[ChatInput], Meta(min_length=1)],
    "metadata": _Metadata,
    "model": Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)],
    "parallel_tool_calls": bool,
    "previous_response_id": str,
    "prompt": str | list[str | int],
    "prompt_cache_key": str,
    "prompt_cache_options": _Object,
    "prompt_cache_retention": str,
    "reasoning": _Object,
    "reasoning_effort": Literal["none", "minimal", "low", "medium", "high", "xhigh"],
    "response_format": _Object,
    "safety_identifier": str,
    "sequence_bias": list[list[Any]],
    "service_tier": Literal[tuple(TIERS)],
    "stop": str | list[str],
    "store": bool,
    "stream": bool,
    "stream_options": _Object,
    "text": _Object,
    "tool_choice": str | _Object,
    "tools": _Objects,
    "user": str,
}
_REQUIRED: Final = {
    CHAT_URL: ("model", "messages"),
    COMPLETIONS_URL: ("model", "prompt"),
    RESPONSES_URL: ("model", "input"),
}


def manner_of(url: str, name: str) -> tuple[Manner, tuple[object, ...]]:
    """Return what happens with a parameter. A refused one may have the values that are returned,
    which have no effect.
    """
    taken, neutral = parameters_of(url)
    if name in _OWN[url]:
        return "honoured", ()
    if name in taken:
        return ("accepted" if name in LABELS else "honoured"), ()
    return "refused", neutral.get(name, ())


def names_of(url: str) -> list[str]:
    """Return the parameters that are honoured or accepted, those that must be there first."""
    required = _REQUIRED[url]
    return [*required, *sorted((parameters_of(url)[0] | _OWN[url]) - {*required})]


def body_of(url: str) -> type[msgspec.Struct]:
    """Return a struct with the parameters of an endpoint. Null counts as absent."""
    words = {CHAT_URL: "ChatBody", COMPLETIONS_URL: "CompletionBody", RESPONSES_URL: "ResponseBody"}
    fields = [
        (name, _TYPES[name]) if name in _REQUIRED[url] else (name, _TYPES[name] | None, None)
        for name in names_of(url)
    ]
    return msgspec.defstruct(words[url], fields, kw_only=True)
