"""instructor: structured answers by a schema and by a tool."""

# mypy: ignore-errors

from functools import partial

import instructor
from openai import OpenAI
from shapes import Colour
from trying import KEY, MODEL, QUESTION, URL, tried

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 60,
    "temperature": 0,
}


def client(mode: instructor.Mode) -> instructor.Instructor:
    plain = OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
    return instructor.from_openai(plain, mode=mode)


def asked(mode: instructor.Mode) -> None:
    assert client(mode).chat.completions.create(**CHAT, response_model=Colour).colour


def stream() -> None:
    parts = list(
        client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
            **CHAT, response_model=Colour
        )
    )
    assert parts[-1].colour


tried("chat", "structured", partial(asked, instructor.Mode.JSON_SCHEMA))
tried("chat", "stream", stream)
tried("chat", "tools", partial(asked, instructor.Mode.TOOLS_STRICT))
tried("responses", "tools", partial(asked, instructor.Mode.RESPONSES_TOOLS))
