"""Blocks of the guides that need a real model: structured output, and tools."""

import asyncio
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import GUIDES, at, blocks, python_of, run_shell
from tests.support.worker import QUEUE, database_url, running_worker
from tests.text.chat.families import HERMES
from tokenmill.openai.forms import read_forms
from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engines.own.sampling import GrammarCompiler

MODEL: dict[str, Any] = {
    "model": "smollm2-135m-instruct", "dtype": "float32", "max_memory_gib": 0.2, "num_threads": 1,
    "lease_seconds": 10,
}  # fmt: skip
STRUCTURED = GUIDES / "structured-output.md"


@pytest.mark.redis
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_guide_of_structured_output_runs(redis_url: str, tmp_path: Path) -> None:
    """Its Python from top to bottom, then its shell commands."""
    database, names, printed = database_url(tmp_path), dict[str, Any](), io.StringIO()
    (shell,) = [text for language, text in blocks(STRUCTURED) if language == "sh"]
    (tmp_path / "city.json").write_text('{"type": "object", "maxProperties": 1}')
    async with running_worker(redis_url, database, **MODEL):
        with contextlib.redirect_stdout(printed):
            code = at("\n".join(python_of(STRUCTURED)), redis_url, database)
            await asyncio.to_thread(exec, code, names)
        done = await run_shell(shell, tmp_path, redis_url, database)
    assert "completion_tokens=" in printed.getvalue()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] in ("yes", "no")


@pytest.mark.redis
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_tool_of_the_guide_is_called(redis_url: str, tmp_path: Path) -> None:
    """The model is not tuned for tools, so the first request asks for a call."""
    (code,) = [block for block in python_of(GUIDES / "client.md") if "tools=" in block]
    first, asked = "tools=[WEATHER]))\nif", 'tools=[WEATHER], tool_choice="required"))\nif'
    assert code.count(first) == 1
    code = code.replace(first, asked).replace('"qwen3-8b"', f'"{QUEUE}"')
    code = code.replace("=[WEATHER]", "=[WEATHER], parallel_tool_calls=False, temperature=0")
    template = tmp_path / "template.jinja"
    template.write_text("{{ (tools or []) | tojson }}\n" + HERMES)
    database, names = database_url(tmp_path), dict[str, Any]()
    model = MODEL | {"chat_template": str(template), "default_max_tokens": 200}
    async with running_worker(redis_url, database, **model):
        with contextlib.redirect_stdout(io.StringIO()):
            await asyncio.to_thread(exec, at(code, redis_url, database), names)
        names["tools_client"].close()
    assert [call["function"]["name"] for call in names["calls"]] == ["weather"]
    assert names["result"].error is None


def test_the_guide_s_tags_compile() -> None:
    (block,) = [text for language, text in blocks(STRUCTURED) if language == "json"]
    compiler = GrammarCompiler.from_vocab([bytes([i]) for i in range(256)] + [b""], [256])
    tag = '[{"begin": "<call=f>", "content": {"type": "any_text"}, "end": "</call>"}]'
    for line in block.splitlines():
        fields = {"response_format": json.loads(line.replace("[…]", tag))}
        read_forms(fields)
        compiler.compile(ResponseFormat(**fields["response_format"])).result(60)
