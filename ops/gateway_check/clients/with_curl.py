"""`curl -N`, by Python's standard library."""

# mypy: ignore-errors

import json
import subprocess
from typing import Any

from trying import COLOUR, KEY, MODEL, QUESTION, SKY, URL, is_city, is_colour, tried

BODY: dict[str, Any] = {
    "model": MODEL,
    "input": QUESTION,
    "max_output_tokens": 12,
    "temperature": 0,
}


def curl(path: str, body: dict[str, Any] | None = None, *options: str) -> str:
    command = ["curl", "-sSN", "--fail-with-body", "-H", f"Authorization: Bearer {KEY}", *options]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(
        [*command, URL + path], check=True, capture_output=True, text=True, timeout=300
    ).stdout


def events(text: str) -> list[dict[str, Any]]:
    *blocks, end = text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]", end
    data = [line for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in data]


def plain() -> None:
    assert json.loads(curl("/responses", BODY))["output"][0]["content"][0]["text"]


def stream() -> None:
    numbers = [
        one["sequence_number"] for one in events(curl("/responses", BODY | {"stream": True}))
    ]
    assert numbers == list(range(len(numbers)))


def structured() -> None:
    form = {"type": "json_schema", "name": "colour", "schema": COLOUR, "strict": True}
    body = BODY | {"max_output_tokens": 60, "text": {"format": form}}
    is_colour(json.loads(curl("/responses", body))["output"][-1]["content"][0]["text"])


def tools() -> None:
    tool = {"type": "function", "name": "sky", "parameters": SKY, "strict": True}
    body = BODY | {"max_output_tokens": 60, "tools": [tool], "tool_choice": "required"}
    is_city(json.loads(curl("/responses", body))["output"][-1]["arguments"])


def resume() -> None:
    whole = events(curl("/responses", BODY | {"stream": True, "background": True}))
    path = f"/responses/{whole[0]['response']['id']}?stream=true"
    assert events(curl(f"{path}&starting_after=5")) == whole[6:]
    assert events(curl(path, None, "-H", "Last-Event-ID: 7")) == whole[8:]


tried("responses", "plain", plain)
tried("responses", "stream", stream)
tried("responses", "structured", structured)
tried("responses", "tools", tools)
tried("responses", "resume", resume)
