"""Thoughts and tool calls survive `kill -9`: each worker lives for a few steps, and every job ends
as it ends undisturbed, with the same thoughts and calls.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.chaos.test_structured_kills import END, run_doomed, undisturbed
from tests.engines.own.truth import tiny_models
from tests.support.marks import LONG
from tests.support.worker import PatientStream, client_of, database_url, running_worker
from tests.text.chat.families import HERMES
from tokenmill_schemas.result import JobResult
from tokenmill_worker.engines.synthetic.runner import TOKENIZER

pytestmark = [pytest.mark.redis, pytest.mark.chaos, pytest.mark.timeout(1800)]

START, STOP = END + 1, END + 2  # the tokens of <think> and </think>
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get", "parameters": CITY, "strict": True}}
HI: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 120,
    "temperature": 1.0,
}
OPEN: dict[str, Any] = {"chat_template_kwargs": {"thinks": True}}
DATE: dict[str, Any] = {"response_format": {"regex": "[12][0-9]{3}-[01][0-9]"}}
CALL: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
KINDS: tuple[dict[str, Any], ...] = (
    OPEN | DATE | {"thinking_budget": 30},
    OPEN | {"thinking_budget": 12} | CALL,
    {"thinking_budget": 5} | CALL,
)
JOBS = [HI | kind | {"seed": seed} for kind in KINDS for seed in range(4)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    base = tiny_models.save("llama", folder / "base")
    for file in TOKENIZER.glob("tokenizer*.json"):
        (base / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    for token_id, mark in ((START, "<think>"), (STOP, "</think>")):
        tokenizer["added_tokens"].append(
            {"id": token_id, "content": mark, "special": False, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False}
        )  # fmt: skip
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("config.json", "generation_config.json"):
        values = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(values | {"eos_token_id": END}))
    template = folder / "template.jinja"
    template.write_text(HERMES + "{{ (tools or []) | length }}{% if thinks %}<think>{% endif %}")
    return {
        "model": str(base), "chat_template": str(template), "dtype": "float32", "num_threads": 1,
        "max_num_seqs": 1024, "max_num_batched_tokens": 2048,  # see test_structured_kills
        "prefix_cache": False,  # no job waits for a block of tokens that another computes
        "max_crashes": 10_000,
    }  # fmt: skip


def answer_of(result: JobResult) -> tuple[Any, ...]:
    (choice,) = result.choices
    return (
        choice.token_ids,
        choice.reasoning,
        choice.text,
        choice.tool_calls,
        choice.finish_reason,
        result.usage.reasoning_tokens,
    )


def assert_valid(asked: dict[str, Any], result: JobResult) -> None:
    assert result.error is None
    if "thinking_budget" in asked:
        assert result.usage.reasoning_tokens <= asked["thinking_budget"] + 2  # and the marks
    if "tools" in asked:
        assert result.finish_reason == "tool_calls", result.text
        for call in result.tool_calls:
            jsonschema.validate(json.loads(call.arguments), CITY)
    else:
        assert len(result.text) == len("2026-11")


async def test_thoughts_and_calls_continue_after_a_kill_at_any_token(
    redis_url: str, tmp_path: Path, settings: dict[str, Any], rounds: int
) -> None:
    """A worker dies after every step in the long form, else after every twentieth."""
    calm = await undisturbed(redis_url, tmp_path, settings, JOBS)
    for asked, result in zip(JOBS, calm, strict=True):
        assert_valid(asked, result)
    database = database_url(tmp_path)
    steps = 1 if rounds >= LONG else 20
    async with client_of(redis_url, database) as client:
        jobs = [await client.submit(**asked) for asked in JOBS]
        streams = [asyncio.create_task(streamed(client, job)) for job in jobs]

        def num_open() -> int:
            return sum(not stream.done() for stream in streams)

        most = max(len(result.token_ids) for result in calm)
        for _ in itertools.repeat(None, most // steps):
            await run_doomed(steps, redis_url, database, settings, num_open)
        async with running_worker(
            redis_url, database, worker_id="survivor", stream_type=PatientStream, **settings
        ):
            received = await asyncio.wait_for(asyncio.gather(*streams), 120)
            ended = [await client.result(job, timeout=90) for job in jobs]
    for wanted, result, stream in zip(calm, ended, received, strict=True):
        assert without_ids(answer_of(result)) == without_ids(answer_of(wanted))
        assert stream == [
            result.reasoning,
            result.text,
            "".join(call.id + call.arguments for call in result.tool_calls),
        ]


def without_ids(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leave out the ids of calls, which depend on the job's."""
    calls = tuple((call.name, call.arguments, call.is_complete) for call in values[3])
    return (*values[:3], calls, *values[4:])


async def streamed(client: Any, job: str) -> list[str]:
    parts = ["", "", ""]
    async for chunk in client.stream(job):
        parts[0] += chunk.reasoning
        parts[1] += chunk.text
        parts[2] += "".join(delta.id + delta.arguments for delta in chunk.tool_calls)
    return parts
