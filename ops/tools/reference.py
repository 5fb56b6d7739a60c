"""Generates parts of the guides from the code.

These are ops/guides/settings.md, the tables and bytes between the markers of
ops/guides/protocol.md, the tables of engines in features.md and engine-protocol.md, and those of
OpenAI's parameters in openai-parameters.md.

    python -m ops.tools.reference            # write them
    python -m ops.tools.reference --check    # report whether they are up to date, as a test does

It covers settings, structs, keys, limits and engines. Every other word of the guides is written by
hand.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as shapes
from pydantic.fields import FieldInfo

from ops.tools import reference_api, reference_bytes, reference_engines
from ops.tools.reference_engines import meanings_of
from tokenmill_schemas import (
    chat_validation,
    keys,
    params_validation,
    validation,
)
from tokenmill_schemas.chat import FunctionCall, Message, TextPart, Tool, ToolCall, ToolFunction
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import Cancel, Drain, TenantLoad, WakeUp, WorkerStatus
from tokenmill_schemas.generation import (
    ArgumentForm,
    CallableTool,
    CallGrammar,
    ResponseFormat,
    SamplingParams,
    TokenLogprob,
)
from tokenmill_schemas.job import JobRequest, RetryPolicy
from tokenmill_schemas.result import (
    ChoiceResult,
    GeneratedCall,
    JobError,
    JobResult,
    ScoredPrompt,
    ToolCallDelta,
    Usage,
)
from tokenmill_worker.settings import ENGINE_FIELDS, PREFIX, Settings
from tokenmill_worker.settings.flags import panel_of

GUIDES = Path(__file__).parents[1] / "guides"
COMMAND = "python -m ops.tools.reference"
_SECTION = re.compile(r"(<!-- generated: ([\w /]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_WORDS: dict[type[shapes.Type], str] = {
    shapes.StrType: "str", shapes.IntType: "int", shapes.FloatType: "float",
    shapes.BoolType: "bool", shapes.NoneType: "nil", shapes.AnyType: "any",
    shapes.BytesType: "bin",
}  # fmt: skip


# ── settings.md ──


def settings_page() -> str:
    panels: dict[str, dict[str, FieldInfo]] = {"Worker": {}, "Engine": {}}
    # otherwise in the order of their definition
    for name in sorted(Settings.model_fields, key=lambda name: name in ENGINE_FIELDS):
        panels.setdefault(panel_of(name), {})[name] = Settings.model_fields[name]
    panels["Tasks"] = panels.pop("Tasks")
    lines = [
        "# Settings",
        "",
        "With this page you can set up the worker, the engine and the background tasks: it lists",
        f"every setting, with its type and default. `{COMMAND}` writes it from",
        "`worker/tokenmill_worker/settings/`; a test fails when it is stale.",
        "",
        "- Each setting is a flag of `tokenmill worker` and a variable: `--max-num-seqs` is",
        f"  `{PREFIX}MAX_NUM_SEQS`.",
        "- Flags win over variables, variables over defaults. There is no settings file.",
        "- A misspelt or impossible setting stops the start, and so does one that the engine",
        "  does not have. All problems are listed together.",
        "- Durations are in seconds. `none` unsets a setting.",
        "- A bool is switched on by its flag and off by the flag with `no-`: `--no-verify-model`.",
        f"  As a variable it is `true` or `false`: `{PREFIX}VERIFY_MODEL=false`.",
    ]
    for title, fields in panels.items():
        lines += ["", f"## {title}", "", *_settings_table(fields)]
    return "\n".join([*lines, ""])


def _settings_table(fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| flag | type | default | |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        words = re.sub(r"\s*\(default: .*\)$", "", field.description or "")
        special = re.search(r"\(default: (.*)\)$", field.description or "")
        default = special[1] if special else _plain_default(field.default)
        flag = f"`--{name.replace('_', '-')}`"
        yield f"| {flag} | {_setting_type(field)} | {default} | {_cell(words)} |"


def _plain_default(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    if value is None or value == "":
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _setting_type(field: FieldInfo) -> str:
    text = str(field.annotation)
    if isinstance(field.annotation, type) and issubclass(field.annotation, Enum):
        return ", ".join(f"`{item.value}`" for item in field.annotation)
    if "Literal" in text:
        words = [f"`{word}`" for word in re.findall(r"'([^']+)'", text)]
        return ", ".join(["float", *words] if "[float," in text else words)
    kind = next((word for word in ("bool", "int", "float") if word in text), "text")
    bounds = [
        f"{sign} {getattr(limit, word):g}"
        for limit in field.metadata
        for word, sign in _BOUNDS.items()
        if hasattr(limit, word)
    ]
    return " ".join([kind, ", ".join(bounds)]).strip()


# ── protocol.md ──


def struct_table(struct: type[msgspec.Struct]) -> str:
    lines = ["| field | type | if left out | |", "|---|---|---|---|"]
    meanings = meanings_of(struct)
    info = shapes.type_info(struct)
    assert isinstance(info, shapes.StructType)
    if info.tag_field is not None:
        lines.append(f'| `{info.tag_field}` | str | must be there | always "{info.tag}" |')
    for field in info.fields:
        default = "must be there" if field.required else _default(field)
        meaning = _cell(meanings.get(field.name, ""))
        lines.append(f"| `{field.encode_name}` | {shape(field.type)} | {default} | {meaning} |")
    return "\n".join(lines)


def _default(field: shapes.Field) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "nil"
    plain = msgspec.to_builtins(value)
    return f"`{json.dumps(plain, ensure_ascii=False)}`"


def shape(kind: shapes.Type) -> str:
    """Name a type in MessagePack's terms."""
    if type(kind) in _WORDS:
        return _WORDS[type(kind)]
    match kind:
        case shapes.CustomType():
            return "any"
        case shapes.EnumType():
            return ", ".join(f"`{item.value}`" for item in kind.cls)
        case shapes.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case shapes.StructType():
            return f"[{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
        case shapes.VarTupleType() | shapes.ListType():
            return f"array of {shape(kind.item_type)}"
        case shapes.TupleType():
            return "array (" + ", ".join(map(shape, kind.item_types)) + ")"
        case shapes.DictType():
            return f"map {shape(kind.key_type)} → {shape(kind.value_type)}"
        case shapes.UnionType():
            return " or ".join(shape(part) for part in kind.types)
    raise TypeError(f"no word for {kind}")


def keys_table() -> str:
    return "\n".join(line for line in (keys.__doc__ or "").splitlines() if line.startswith("|"))


# what each limit bounds; a limit without a word here is an error
_LIMITS = {
    "MAX_PAYLOAD_BYTES": "bytes of an encoded request",
    "MAX_CHOICES": "`n`, and entries of `continuations`",
    "MAX_MESSAGES": "entries of `messages`",
    "MAX_DOCUMENTS": "entries of `documents`",
    "MAX_TOOLS": "entries of `tools`",
    "MAX_METADATA": "entries of `metadata`",
    "MAX_METADATA_CHARS": "characters of a value of `metadata`",
    "MAX_PROMPT_IDS": "entries of `prompt_ids`",
    "MAX_NAME_CHARS": "characters of `job_id`, `model`, `tenant`, `idempotency_key`, `batch_id`, "
    "`lora`, `traceparent`, and of a key of `metadata`",
    "MAX_URL_CHARS": "characters of `webhook`",
    "MAX_ECHO": "characters or ids of the prompt times `n`, with `echo`",
    "MAX_MS": "a time",
    "MAX_FORMAT_CHARS": "characters of a regular expression or a grammar; bytes of a JSON schema, "
    "of `tools`, of `chat_template_kwargs`, and of `continuations`",
    "MAX_FORMAT_DEPTH": "levels of a JSON schema, and of `chat_template_kwargs`",
    "MAX_LOGIT_BIASES": "entries of `logit_bias`",
    "MAX_SEQUENCES": "entries of `bad_words_ids`, and of `sequence_bias`",
    "MAX_SEQUENCE_IDS": "ids of `bad_words_ids`, of `sequence_bias`, of `suppress_tokens`, and of "
    "`begin_suppress_tokens`",
    "MAX_NGRAM": "`no_repeat_ngram_size`",
    "MAX_STOP_STRINGS": "entries of `stop`",
    "MAX_STOP_CHARS": "characters of an entry of `stop`",
    "MAX_STOP_TOKEN_IDS": "entries of `stop_token_ids`",
    "MAX_TOP_LOGPROBS": "`top_logprobs`, `prompt_logprobs`",
    "MAX_ID": "a token id, `max_tokens`, `min_tokens`, `thinking_budget`, `top_k`",
}


def limits_table() -> str:
    limits = {
        name: value
        for module in (validation, params_validation, chat_validation)
        for name, value in vars(module).items()
        if name.startswith("MAX_") and name.isupper()
    }
    if set(limits) != set(_LIMITS):
        raise ValueError(f"limits and their words differ: {sorted(set(limits) ^ set(_LIMITS))}")
    rows = (f"| {words} | {limits[name]:,} |" for name, words in _LIMITS.items())
    return "\n".join(("| at most | |", "|---|---|", *rows))


STRUCTS: tuple[type[msgspec.Struct], ...] = (
    JobRequest, Message, TextPart, ToolCall, FunctionCall, Tool, ToolFunction, SamplingParams,
    ResponseFormat, CallGrammar, CallableTool, ArgumentForm, RetryPolicy, Chunk, ToolCallDelta,
    TokenLogprob, ScoredPrompt, JobResult, ChoiceResult, GeneratedCall, Usage, JobError, Cancel,
    Drain, WakeUp, WorkerStatus, TenantLoad,
)  # fmt: skip
PROTOCOL: dict[str, Callable[[], str]] = {
    "keys": keys_table,
    "limits": limits_table,
    **{struct.__name__: lambda struct=struct: struct_table(struct) for struct in STRUCTS},  # type: ignore[misc]
    **{
        f"bytes of {name}": lambda name=name: reference_bytes.block(name)  # type: ignore[misc]
        for name in reference_bytes.EXAMPLES
    },
}


# ── the pages ──


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "protocol.md": PROTOCOL,
    "features.md": {"kinds of engine": reference_engines.kinds_table},
    "openai-parameters.md": {
        url.removeprefix("/v1/"): lambda url=url: reference_api.parameters_table(url)  # type: ignore[misc]
        for url in reference_api.BODIES
    },
    "vllm.md": {"parameters": lambda: reference_engines.parameters_table("vllm")},
    "engine-protocol.md": {
        struct.__name__: lambda struct=struct: struct_table(struct)  # type: ignore[misc]
        for struct in reference_engines.STRUCTS
    },
}


def filled(page: str, text: str) -> str:
    """Return the text of a page with every section between markers generated anew.

    An unknown or a missing section is an error.
    """
    wanted = set(SECTIONS[page])

    def write(found: re.Match[str]) -> str:
        wanted.discard(found[2])
        return f"{found[1]}{SECTIONS[page][found[2]]()}\n{found[3]}"

    text = _SECTION.sub(write, text)
    if wanted:
        raise SystemExit(f"{page} lacks the sections {', '.join(sorted(wanted))}")
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> dict[Path, str]:
    return {
        GUIDES / "settings.md": settings_page(),
        **{
            GUIDES / name: filled(name, (GUIDES / name).read_text(encoding="utf-8"))
            for name in SECTIONS
        },
    }


def main(arguments: list[str]) -> int:
    stale = [
        path
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    names = ", ".join(path.name for path in stale)
    if "--check" in arguments:
        print(f"stale: {names}; run `{COMMAND}`" if stale else "up to date")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")
    print(f"wrote {names}" if stale else "up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
