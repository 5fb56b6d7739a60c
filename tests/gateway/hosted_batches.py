"""Requests for batches through OpenAI's client, and a sweep that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from tests.gateway.conftest import MODEL
from tests.support.waiting import until
from tokenmill_worker.tasks.batches import BatchRuns

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True},
    TEXT: {"prompt": "Hi", "max_tokens": 4, "ignore_eos": True},
    RESPONSES: {"input": "Hi", "max_output_tokens": 4, "ignore_eos": True},
}
FINAL = ("completed", "failed", "expired", "cancelled")


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    whole = {"model": MODEL, **BODIES.get(url, {}), **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": whole}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@contextlib.asynccontextmanager
async def running(runs: BatchRuns) -> AsyncIterator[None]:
    """Run due batches inside the block, as the sweep does; then end behind the one that runs."""
    is_over = asyncio.Event()

    async def sweep() -> None:
        while not is_over.is_set():
            for lease in await asyncio.to_thread(runs.claim):
                if not is_over.is_set():
                    await asyncio.to_thread(runs.run, lease)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(sweep())
    try:
        yield
    finally:
        is_over.set()
        await asyncio.wait((task,))
    task.result()


async def begun(client: Any, content: bytes, url: str = CHAT, **more: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        **{"input_file_id": file.id, "endpoint": url, "completion_window": "24h", **more}
    )


async def ended(client: Any, batch_id: str) -> Any:
    async def is_over() -> bool:
        return (await client.batches.retrieve(batch_id)).status in FINAL

    await until(is_over, pause_s=0.05)
    return await client.batches.retrieve(batch_id)


async def lines_of(client: Any, file_id: str) -> dict[str, Any]:
    text = (await client.files.content(file_id)).text
    found = [json.loads(each) for each in text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}
