"""From the body of an OpenAI request to the fields of a job: chats and completions, as far as a queue can serve them.

A parameter that would change the answer and cannot be obeyed is refused by its name; labels that change nothing
(user, metadata, …) are let pass; what OpenAI's servers do not know either is refused as unknown, except for the
sampling parameters that vLLM adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from schemas.openai import CHAT_URL


class BodyError(ValueError):
    """One line's body is refused. `param` names the part."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


_NUMBERS: Final = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "n",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
)  # fmt: skip
_LABELS: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
})  # fmt: skip
# parameter → the values at which it asks for nothing
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "stream": (False,),
    "stream_options": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "suffix": ("",),
}
_CHAT_ONLY: Final = frozenset({"messages", "max_completion_tokens", "top_logprobs"})
_COMPLETION_ONLY: Final = frozenset({"prompt", "best_of"})
_ROLES: Final = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_COMPLETION_TOKENS: Final = 16  # what OpenAI gives a completion that names no length
_MAX_STOPS: Final = 4


def fields_of(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for `submit`. Raises BodyError; what the values must be is left to the queue's own checks."""
    body = {name: value for name, value in body.items() if value is not None}
    is_chat = url == CHAT_URL
    _check_names(body, is_chat)
    fields: dict[str, Any] = {name: body[name] for name in _NUMBERS if name in body}
    fields["model"] = _model(body)
    fields |= _chat(body) if is_chat else _completion(body)
    if "stop" in body:
        fields["stop"] = _stops(body["stop"])
    if "logit_bias" in body:
        fields["logit_bias"] = _biases(body["logit_bias"])
    if "response_format" in body:
        fields["response_format"] = _format(body["response_format"])
    return {name: value for name, value in fields.items() if value is not None}


def _check_names(body: Mapping[str, Any], is_chat: bool) -> None:
    other = _COMPLETION_ONLY if is_chat else _CHAT_ONLY
    for name, value in body.items():
        if name in _NEUTRAL:
            if not any(value == neutral for neutral in _NEUTRAL[name]):
                raise BodyError(f"{name!r} is not supported here", name, "unsupported_parameter")
        elif name in other or name not in _KNOWN:
            raise BodyError(f"Unrecognized request argument supplied: {name[:64]}", name[:64], "unknown_parameter")


_KNOWN: Final = (
    frozenset(_NUMBERS) | _LABELS | _CHAT_ONLY | _COMPLETION_ONLY
    | {"model", "max_tokens", "stop", "logit_bias", "logprobs", "response_format"}
)  # fmt: skip


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BodyError("you must provide a model parameter", "model", "missing_required_parameter")
    return model


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    if "messages" not in body:
        raise BodyError("Missing required parameter: 'messages'.", "messages", "missing_required_parameter")
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise BodyError("messages must be a list of at least one message", "messages")
    longest = body.get("max_completion_tokens", body.get("max_tokens"))
    return {
        "messages": [_message(message, place) for place, message in enumerate(messages)],
        "max_tokens": longest,
        **_chat_logprobs(body),
    }


def _chat_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    wanted, top = body.get("logprobs", False), body.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise BodyError("logprobs must be true or false", "logprobs")
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= 20:
        raise BodyError("top_logprobs must be an integer from 0 to 20", "top_logprobs")
    if top and not wanted:
        raise BodyError("top_logprobs needs logprobs to be true", "top_logprobs")
    return {"logprobs": wanted, "top_logprobs": top} if wanted else {}


def _message(message: Any, place: int) -> dict[str, str]:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise BodyError(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BodyError(f"{where}.role must be one of {', '.join(_ROLES)}, not {str(role)[:64]!r}", f"{where}.role")
    for name in ("tool_calls", "tool_call_id", "function_call", "audio", "name"):
        if message.get(name):
            raise BodyError(f"'{where}.{name}' is not supported here", f"{where}.{name}", "unsupported_parameter")
    content, refusal = message.get("content"), message.get("refusal")
    if role == "assistant" and content is None and isinstance(refusal, str):
        content = refusal  # what was said instead
    return {"role": _ROLES[role], "content": _content(content, where)}


def _content(content: Any, where: str) -> str:
    """Text, or parts that all are text; a refusal is what the assistant said."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BodyError(f"{where}.content must be text", f"{where}.content")
    texts: list[str] = []
    for place, part in enumerate(content):
        inner = f"{where}.content[{place}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise BodyError(f"{inner}: only text is supported, not {kind}", inner, "unsupported_parameter")
        if not isinstance(part.get(kind), str):
            raise BodyError(f"{inner}.{kind} must be text", inner)
        texts.append(part[kind])
    return "".join(texts)


def _completion(body: Mapping[str, Any]) -> dict[str, Any]:
    if "prompt" not in body:
        raise BodyError("Missing required parameter: 'prompt'.", "prompt", "missing_required_parameter")
    fields: dict[str, Any] = {"max_tokens": body.get("max_tokens", _COMPLETION_TOKENS), **_prompt(body["prompt"])}
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        raise BodyError("'best_of' other than n is not supported here", "best_of", "unsupported_parameter")
    logprobs = body.get("logprobs")
    if logprobs is not None:
        if isinstance(logprobs, bool) or not isinstance(logprobs, int) or not 0 <= logprobs <= 5:
            raise BodyError("logprobs must be an integer from 0 to 5", "logprobs")
        fields["logprobs"] = logprobs or True
    return fields


def _prompt(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return {"prompt_ids": prompt}
    raise BodyError("prompt must be one text or one list of token ids; write a line for each prompt", "prompt")


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise BodyError("stop must be a text or a list of texts", "stop")
    if len(stops) > _MAX_STOPS:
        raise BodyError(f"stop may have {_MAX_STOPS} texts, not {len(stops)}", "stop")
    return stops


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, dict):
        raise BodyError("logit_bias must be an object from token ids to numbers", "logit_bias")
    try:
        return {int(token): float(bias) for token, bias in biases.items()}
    except (TypeError, ValueError, OverflowError):
        raise BodyError("logit_bias must be an object from token ids to numbers", "logit_bias") from None


def _format(wanted: Any) -> dict[str, Any] | None:
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    read = _FORMATS.get(kind) if isinstance(kind, str) else None
    if read is None:
        kinds = ", ".join(_FORMATS)
        raise BodyError(f"response_format.type must be one of {kinds}, not {str(kind)[:64]}", "response_format")
    return read(wanted)


def _schema_format(wanted: dict[str, Any]) -> dict[str, Any]:
    inner = wanted.get("json_schema")
    schema = inner.get("schema", {}) if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        where = "response_format.json_schema.schema"
        raise BodyError(f"{where} must be a JSON schema", where)
    return {"json_schema": schema}


_FORMATS: Final[Mapping[str, Callable[[dict[str, Any]], dict[str, Any] | None]]] = {
    "text": lambda _: None,
    "json_object": lambda _: {"json_schema": {}},
    "json_schema": _schema_format,
}
