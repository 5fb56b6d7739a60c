"""The tables of OpenAI's parameters: those that the installed `openai` names, and what the gateway
does with each.
"""

import textwrap
from typing import Any, get_type_hints

from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as Chat
from openai.types.completion_create_params import (
    CompletionCreateParamsNonStreaming as TextCompletion,
)
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming as Response,
)

from tokenmill_gateway.parameters import manner_of, names_of
from tokenmill_schemas.openai import CHAT_URL, COMPLETIONS_URL, RESPONSES_URL

BODIES: dict[str, Any] = {
    RESPONSES_URL: Response, CHAT_URL: Chat, COMPLETIONS_URL: TextCompletion,
}  # fmt: skip


def parameters_table(url: str) -> str:
    theirs = sorted(get_type_hints(BODIES[url]))
    lines = ["| parameter | |", "|---|---|", *(_row(url, name) for name in theirs)]
    more = ", ".join(f"`{name}`" for name in names_of(url) if name not in theirs)
    return "\n".join([*lines, "", textwrap.fill(f"Also taken: {more}.", 100)])


def _row(url: str, name: str) -> str:
    manner, values = manner_of(url, name)
    words = f"{manner}, except {' and '.join(f'`{_json(value)}`' for value in values)}"
    return f"| `{name}` | {words if values else manner} |"


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')
