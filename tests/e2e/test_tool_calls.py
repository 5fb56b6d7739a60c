"""Tool calls by the real model and the whole worker: what is streamed is what is recorded, and
every call keeps its schema. The model is not tuned for tools; the grammar makes the calls valid.
"""

import json
from pathlib import Path

import jsonschema
import pytest

from tests.support.worker import client_of, database_url, running_worker
from tests.text.chat.families import HERMES

pytestmark = [pytest.mark.redis, pytest.mark.model, pytest.mark.timeout(300)]

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
OTHER_FORMS = ("xml", "pythonic", "deepseek")


@pytest.mark.parametrize(
    "form",
    ["hermes", *(pytest.param(form, marks=pytest.mark.slow) for form in OTHER_FORMS)],
)
async def test_streamed_calls_join_to_valid_recorded_ones(
    redis_url: str, tmp_path: Path, form: str
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ (tools or []) | tojson }}\n" + HERMES)
    model = {
        "model": "smollm2-135m-instruct",
        "dtype": "float32",
        "num_blocks": 256,
        "num_threads": 1,
        "chat_template": str(template),
        "tool_format": form,
    }
    database = database_url(tmp_path)
    async with (
        running_worker(redis_url, database, in_process=True, lease_seconds=10, **model),
        client_of(redis_url, database) as client,
    ):
        jobs = [
            await client.submit(
                messages=[{"role": "user", "content": "Is it warm in Bern?"}],
                tools=TOOLS,
                tool_choice=choice,
                parallel_tool_calls=False,
                max_tokens=220,
                temperature=1.0,
                seed=seed,
            )
            for seed in range(4)
            for choice in ("required", "auto")
        ]
        for place, job in enumerate(jobs):
            pieces = [d async for chunk in client.stream(job) for d in chunk.tool_calls]
            result = await client.result(job, timeout=120)
            assert result.error is None
            assert [d.id for d in pieces if d.id] == [call.id for call in result.tool_calls]
            if place % 2 == 0:
                assert result.finish_reason == "tool_calls"
            for index, call in enumerate(result.tool_calls):
                own = [delta for delta in pieces if delta.index == index]
                assert "".join(delta.arguments for delta in own) == call.arguments
                if call.is_complete:
                    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
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
