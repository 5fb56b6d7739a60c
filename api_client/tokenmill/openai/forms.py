"""Reads the request shapes of OpenAI's API: prompts, stop texts, biases and response formats;
messages.py and tools.py read the others.

Clients, the command line, Celery tasks and bulk files all use `read_forms`, so that the same shape
gives the same job or the same error everywhere. A shape that this project defines itself
(`response_format` with `json_schema`, `regex`, `grammar` or `choice` and without `type`) is read
here too, and so are vLLM's structural tags.

An unknown key is rejected by its name. A key whose value is null counts as absent, as in OpenAI's
API.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard

from tokenmill.openai.form_values import FormError, present, refuse_unknown, shown
from tokenmill.openai.messages import read_messages
from tokenmill.openai.tools import read_tool_choice, read_tools
from tokenmill_schemas.size_limits import WHOLE_NUMBER

_OWN_FORMAT_KEYS: Final = (
    "json_schema", "regex", "grammar", "choice", "structural_tag", "strict",
)  # fmt: skip
_CHOICE: Final = "response_format.choice"
_SCHEMA_KEYS: Final = ("name", "description", "schema", "strict")


def read_forms(fields: dict[str, Any]) -> None:
    """Replace OpenAI's shapes in the arguments of `submit` by the fields of a job. Values are
    builtins.

    Raises FormError for the first shape that cannot be read.
    """
    for name, read in _READERS.items():
        if fields.get(name) is not None:
            read(fields)


def _read_prompt(fields: dict[str, Any]) -> None:
    """A prompt of token ids becomes `prompt_ids`; a list of one prompt is that prompt."""
    prompt = fields["prompt"]
    if (
        isinstance(prompt, list | tuple)
        and len(prompt) == 1
        and isinstance(prompt[0], str | list | tuple)
    ):
        prompt = fields["prompt"] = prompt[0]
    if isinstance(prompt, str):
        return
    if (
        not isinstance(prompt, list | tuple)
        or not prompt
        or not all(type(item) is int for item in prompt)
    ):
        words = "prompt must be one text or one list of token ids; several prompts are several jobs"
        raise FormError(words, "prompt")
    if fields.get("prompt_ids") is not None:
        raise FormError("prompt and prompt_ids both hold token ids: give one of them", "prompt")
    fields["prompt_ids"] = fields.pop("prompt")


def _read_length(fields: dict[str, Any]) -> None:
    """Rename `max_completion_tokens` to `max_tokens`, and replace any value given there."""
    fields["max_tokens"] = fields.pop("max_completion_tokens")


def _read_stop(fields: dict[str, Any]) -> None:
    stop = fields["stop"]
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(item, str) for item in stops):
        raise FormError("stop must be a text or a list of texts", "stop")
    fields["stop"] = tuple(stops)


def _read_biases(fields: dict[str, Any]) -> None:
    """Convert token ids that are texts to integers, because keys of JSON objects are texts."""
    given = fields["logit_bias"]
    if not isinstance(given, Mapping) or not all(
        _is_token_id(key) and _is_number(bias) for key, bias in given.items()
    ):
        raise FormError("logit_bias must be a map from token ids to numbers", "logit_bias")
    try:
        fields["logit_bias"] = {int(key): float(bias) for key, bias in given.items()}
    except OverflowError:
        raise FormError("logit_bias holds a number beyond 64 bits", "logit_bias") from None


def _is_token_id(key: object) -> TypeGuard[int | str]:
    return type(key) is int or (isinstance(key, str) and WHOLE_NUMBER.fullmatch(key) is not None)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ── response formats ──


def _read_format(fields: dict[str, Any]) -> None:
    wanted = fields["response_format"]
    if not isinstance(wanted, Mapping):
        raise FormError("response_format must be an object", "response_format")
    given = present(wanted)
    if "type" not in given:
        refuse_unknown(given, _OWN_FORMAT_KEYS, "response_format", "; without type it takes")
        fields["response_format"] = _with_choice_as_grammar(given)
        return
    kind = given["type"]
    read = _FORMATS.get(kind) if isinstance(kind, str) else None
    if read is None:
        kinds = ", ".join(_FORMATS)
        words = f"response_format.type must be one of {kinds}, not {shown(kind)}"
        raise FormError(words, "response_format.type")
    fields["response_format"] = read(given)


def _with_choice_as_grammar(given: dict[str, Any]) -> dict[str, Any]:
    """Replace `choice`, a list of texts of which the answer is one, by its grammar."""
    if "choice" not in given:
        return given
    choice = given.pop("choice")
    if "grammar" in given:
        raise FormError("response_format has choice beside grammar: give one of them", _CHOICE)
    if not isinstance(choice, list | tuple) or not choice or not all(map(_is_choice, choice)):
        raise FormError(f"{_CHOICE} must be a list of texts that are not empty", _CHOICE)
    words = [json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(choice)]
    return {**given, "grammar": f"root ::= {' | '.join(words)}"}


def _is_choice(text: object) -> TypeGuard[str]:
    return isinstance(text, str) and bool(text)


def _tag_format(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read a structural tag: xgrammar's `format`, or its older `structures` and `triggers`."""
    refuse_unknown(given, ("type", "format", "structures", "triggers"), "response_format")
    if "format" in given:
        inner = given["format"]
        if not isinstance(inner, Mapping) or len(given) > 2:
            words = "response_format.format must be an object, without structures and triggers"
            raise FormError(words, "response_format.format")
        return {"structural_tag": {"type": "structural_tag", "format": inner}}
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list | tuple) or not all(map(_is_structure, structures)):
        where = "response_format.structures"
        raise FormError(f"{where} must be a list of tags, each with begin, schema and end", where)
    tags = [
        {
            "type": "tag",
            "begin": tag["begin"],
            "content": {"type": "json_schema", "json_schema": tag["schema"]},
            "end": tag["end"],
        }
        for tag in structures
    ]
    tagged = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return {"structural_tag": {"type": "structural_tag", "format": tagged}}


def _is_structure(tag: object) -> bool:
    return isinstance(tag, Mapping) and tag.keys() == {"begin", "schema", "end"}


def _text_format(given: Mapping[str, Any]) -> None:
    """Read the format "text", which allows any text: the same as no format."""
    refuse_unknown(given, ("type",), "response_format")


def _object_format(given: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unknown(given, ("type",), "response_format")
    return {"json_schema": {}}


def _schema_format(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read a schema from OpenAI's envelope, where it stands beside `name` and `strict`. OpenAI's
    default for `strict` is false.
    """
    where = "response_format.json_schema"
    refuse_unknown(given, ("type", "json_schema"), "response_format")
    envelope = given.get("json_schema")
    if not isinstance(envelope, Mapping):
        raise FormError(f"{where} must be an object with name, strict and schema", where)
    inner = present(envelope)
    refuse_unknown(inner, _SCHEMA_KEYS, where, "; it takes")
    schema, strict = inner.get("schema"), inner.get("strict", False)
    if not isinstance(schema, Mapping):
        raise FormError(f"{where}.schema must be a JSON schema", f"{where}.schema")
    if not isinstance(strict, bool):
        raise FormError(
            f"{where}.strict must be true or false, not {shown(strict)}", f"{where}.strict"
        )
    for name in ("name", "description"):
        if not isinstance(inner.get(name, ""), str):
            raise FormError(f"{where}.{name} must be a text", f"{where}.{name}")
    return {"json_schema": schema, "strict": strict}


_FORMATS: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]]] = {
    "text": _text_format,
    "json_object": _object_format,
    "json_schema": _schema_format,
    "structural_tag": _tag_format,
}
_READERS: Final[Mapping[str, Callable[[dict[str, Any]], None]]] = {
    "prompt": _read_prompt,
    "messages": read_messages,
    "tools": read_tools,
    "tool_choice": read_tool_choice,
    "max_completion_tokens": _read_length,
    "stop": _read_stop,
    "logit_bias": _read_biases,
    "response_format": _read_format,
}
