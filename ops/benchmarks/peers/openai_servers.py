"""Servers of OpenAI's API with one model: `tokenmill gateway` before a worker, and `vllm serve`.

A round streams chats with prompts of its own. Then each server gets background responses, and all
of its processes are killed while these run; what can be fetched from the restarted server is left.
"""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
from openai import AsyncOpenAI

from ops.benchmarks.peers.child import VLLM_VARIABLES
from ops.benchmarks.peers.service import TOKENMILL, MeasuredService
from tokenmill_worker.engines.own.model.model_files import resolve
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.record import migrate

NAME, PLACES, LENGTH = "smollm2-135m-instruct", 64, 2048
SERVERS = ("tokenmill gateway", "tokenmill gateway, vllm", "vllm serve")
TOKENS = 64  # of a background response


class OpenAIServer(MeasuredService):
    def __init__(self, name: str, python: Path) -> None:
        super().__init__()
        port, model = free_port(), str(resolve(NAME))
        self._client = AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=900
        )
        url, database = f"unix://{self.socket}", f"sqlite:///{self.folder / 'results.db'}"
        migrate.upgrade(database)
        settings = {
            "REDIS_URL": url, "DATABASE_URL": database, "QUEUE": NAME, "MODEL": model,
            "DTYPE": "float32", "MAX_NUM_SEQS": str(PLACES), "MAX_MODEL_LEN": str(LENGTH),
        }  # fmt: skip
        if name == SERVERS[1]:
            settings |= {
                "ENGINE": "vllm", "ENGINE_PYTHON": str(python), "ENGINE_ARG": "enforce-eager=true"
            }  # fmt: skip
        ours = {
            "worker": [TOKENMILL, "worker"],
            "gateway": [
                TOKENMILL, "gateway", "--open", "--port", str(port), "--model", f"{NAME}={NAME}",
            ],
        }  # fmt: skip
        theirs = {
            "server": [
                str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model,
                "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port),
                "--dtype", "float32", "--enforce-eager", "--max-model-len", str(LENGTH),
                "--max-num-seqs", str(PLACES), "--disable-uvicorn-access-log",
            ]
        }  # fmt: skip
        variables = {f"TOKENMILL_{key}": value for key, value in settings.items()}
        store = {"VLLM_ENABLE_RESPONSES_API_STORE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        commands = theirs if name == SERVERS[2] else ours
        self.start(commands, {**os.environ, **VLLM_VARIABLES, **store, **variables})

    async def is_ready(self) -> bool:
        try:
            return bool(await self._stream("Hello", 1))
        except openai.APIError:
            return False

    async def _stream(self, prompt: str, tokens: int) -> float:
        """Read one answer to its end; return the seconds to its first token."""
        since, first_s = time.monotonic(), 0.0
        messages: Any = [{"role": "user", "content": prompt}]
        stream = await self._client.chat.completions.create(
            model=NAME, messages=messages, stream=True, max_tokens=tokens, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first_s = first_s or time.monotonic() - since
        return first_s

    def stream_chats(self, number: int, streams: int, tokens: int) -> dict[str, float]:
        """Stream the chats of a round; return tokens per second, and the median first token."""
        return self.loop.run(self._stream_chats(number, streams, tokens))

    async def _stream_chats(self, number: int, streams: int, tokens: int) -> dict[str, float]:
        prompts = [
            f"Round {number} of {streams}: tell me story {place}." for place in range(streams)
        ]
        since = time.monotonic()
        first_s = await asyncio.gather(*(self._stream(prompt, tokens) for prompt in prompts))
        rate = streams * tokens / (time.monotonic() - since)
        return {"tok_s": rate, "first_ms": statistics.median(first_s) * 1e3}

    def left_after_kill(self, count: int) -> dict[str, float]:
        """Return how many of `count` background responses are completed though all was killed."""
        return self.loop.run(self._left_after_kill(count))

    async def _left_after_kill(self, count: int) -> dict[str, float]:
        made = [
            await self._client.responses.create(
                model=NAME, input=f"Tell me story {place}.", background=True,
                max_output_tokens=TOKENS,
            )
            for place in range(count)
        ]  # fmt: skip
        await asyncio.sleep(2)
        for part in self._commands:
            self._end(part, signal.SIGKILL)
        for part in self._commands:
            self._start(part)
        await self._wait_ready()
        ended = await asyncio.gather(*(self._ended(response.id) for response in made))
        return {"left": sum(ended)}

    async def _ended(self, name: str) -> bool:
        while True:
            try:
                response = await self._client.responses.retrieve(name)
            except openai.NotFoundError:
                return False
            if response.status not in ("queued", "in_progress"):
                return response.status in ("completed", "incomplete") and bool(response.output_text)
            await asyncio.sleep(0.2)


def compare(
    python: Path, streams: Sequence[int], tokens: int, *, rounds: int = 3, responses: int = 100
) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Yield a title and a table of each number of streams, medians, and of what a kill has left."""
    servers = {name: OpenAIServer(name, python) for name in SERVERS}
    try:
        for count in streams:
            turns = [
                {name: each.stream_chats(number, count, tokens) for name, each in servers.items()}
                for number in range(rounds)
            ]
            medians = {
                name: {key: statistics.median(turn[name][key] for turn in turns) for key in figures}
                for name, figures in turns[0].items()
            }
            yield f"{count} streams of {tokens} tokens", medians
        left = {name: server.left_after_kill(responses) for name, server in servers.items()}
        yield f"{responses} background responses, every process killed", left
    finally:
        for server in servers.values():
            server.close()
