"""The scripts of all clients in Python share this module, which needs Python alone.

A script runs in the environment of its client, gets a gateway's address, a key and a model in its
variables, and prints a line of JSON for each thing that it tried.
"""

# mypy: ignore-errors

import json
import os
from collections.abc import Callable
from typing import Any

URL = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]
MODEL = os.environ["MODEL"]
QUESTION = "Name a colour."
COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
SKY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def tried(api: str, thing: str, function: Callable[[], Any]) -> None:
    """Run a function, and print whether it worked."""
    error = None
    try:
        function()
    except Exception as reason:
        error = f"{type(reason).__name__}: {reason}"[:600]
    print(json.dumps({"api": api, "thing": thing, "error": error}), flush=True)


def is_colour(text: str | None) -> None:
    assert json.loads(text or "")["colour"] in COLOUR["properties"]["colour"]["enum"], text


def is_city(arguments: str | dict[str, Any] | None) -> None:
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert found, arguments
    assert found["city"] in SKY["properties"]["city"]["enum"], found
