"""Tool calls by the whole worker: what is streamed is what is recorded, and every call keeps its
schema. The model is not tuned for tools; the grammar makes the calls valid.

`--rounds 2500 -m ""` makes 2,500 required calls of the real model in each form, and asks as often
for free text that may call. With fewer than 50 rounds the weights are drawn.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support import tiny_llama
from tests.support.marks import LONG, long_unless
from tests.support.worker import client_of, database_url, running_worker
from tests.text.chat.families import HERMES
from tokenmill import AsyncClient

pytestmark = [pytest.mark.redis, pytest.mark.model, pytest.mark.timeout(3600)]

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "is_warm": {"type": ["boolean", "null"]},
    },
    "required": ["city", "days", "is_warm"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": CITY, "now": {"type": "object", "maxProperties": 0}}
TOGETHER = 48  # jobs in the worker at once


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", long_unless({"hermes", "xml"}, ["hermes", "xml", "pythonic", "deepseek"])
)
async def test_streamed_pieces_of_calls_join_to_the_recorded_calls_which_keep_their_schema(
    redis_url: str, tmp_path: Path, form: str, rounds: int
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ (tools or []) | tojson }}\n" + HERMES)
    is_long = rounds >= LONG
    model: dict[str, Any] = {
        "model": "smollm2-135m-instruct" if is_long else str(tiny_llama.save(tmp_path / "tiny")),
        "dtype": "float32",
        "max_memory_gib": 0.7,
        "num_threads": 1,
        "chat_template": str(template),
        "tool_format": form,
    }
    database = database_url(tmp_path)
    in_process = form == "hermes"  # a form is the worker's matter, wherever its engine runs
    async with (
        running_worker(redis_url, database, in_process=in_process, lease_seconds=10, **model),
        client_of(redis_url, database) as client,
    ):
        num_calls = 0
        for first in range(0, rounds, TOGETHER):
            seeds = range(first, min(rounds, first + TOGETHER))
            num_calls += sum(await asyncio.gather(*(ask(client, seed) for seed in seeds)))
        print(f"{form}: {num_calls} calls")  # noqa: T201
        refused = await client.submit(
            messages=[{"role": "user", "content": "Hi"}],
            tools=[
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {"properties": {"a": {"$ref": "https://example.org/a"}}},
                        "strict": True,
                    },
                }
            ],
        )
        error = (await client.result(refused, timeout=120)).error
        assert error is not None
        assert error.message.startswith("tools cannot be used: the parameters of 'f' ")


async def ask(client: AsyncClient, seed: int) -> int:
    """Stream a required call and an answer that may have calls; return how many came."""
    num_calls = 0
    for choice in ("required", "auto"):
        job = await client.submit(
            messages=[{"role": "user", "content": "Is it warm in Bern?"}],
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=300 if choice == "required" else 60,  # each may be a byte
            temperature=1.0,
            seed=seed,
        )
        pieces = [d async for chunk in client.stream(job) for d in chunk.tool_calls]
        result = await client.result(job, timeout=120)
        assert result.error is None
        assert [d.id for d in pieces if d.id] == [call.id for call in result.tool_calls]
        if choice == "required":
            assert result.finish_reason == "tool_calls"
        for index, call in enumerate(result.tool_calls):
            own = [delta for delta in pieces if delta.index == index]
            assert "".join(delta.arguments for delta in own) == call.arguments
            if call.is_complete:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        num_calls += len(result.tool_calls)
    return num_calls
