"""`ops/bench gateway`: what `tokenmill gateway` costs beside the client alone, in one run.

A worker with the synthetic engine serves both: the client in a process of its own, and one gateway
whose readers share this process. Figures are the CPU time of that client and of that gateway, and
the time of the first token. Then: a request of one token, silent streams, a resume.

With `--peer vllm`, instead: a real model behind the gateway, by our engine and by vLLM, and `vllm
serve`, in turns; then what a kill of every process leaves of 100 background responses.
"""

import argparse
import asyncio
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from ops.benchmarks.measure.tables import show
from ops.benchmarks.peers import openai_servers
from ops.benchmarks.peers.child import vllm_python
from ops.benchmarks.peers.service import TOKENMILL, MeasuredService, cpu_seconds
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.record import migrate

MODEL = "synthetic?step_ms=8&length=8192"
COLUMNS = {
    "cpu_us": ("µs CPU a token", "{:.1f}"), "rate": ("tokens a CPU second", ""),
    "ratio": ("× client", "{:.2f}"), "first_ms": ("first token, ms", "{:.1f}"),
    "request_ms": ("ms CPU a request", "{:.2f}"), "cpu": ("CPU of a core", "{:.1%}"),
    "memory_mb": ("MB more", "{:.0f}"), "event_ms": ("first event, ms", "{:.0f}"),
    "tok_s": ("tok/s", "{:.1f}"), "left": ("background responses left", "{:.0f}"),
}  # fmt: skip
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--silent", type=int, default=5_000)
    parser.add_argument("--peer", choices=("vllm",))


class Gateway(MeasuredService):
    """One gateway and its queue. The client alone is `python -m` this module."""

    def __init__(self) -> None:
        super().__init__()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        self.redis_url = f"unix://{self.socket}"
        database = f"sqlite:///{self.folder}/results.db"
        migrate.upgrade(database)
        self.port = free_port()
        model = ["--model", f"{MODEL}=q", "--model", "nobody=nobody"]
        self.start(
            {
                "worker": [TOKENMILL, "worker"],
                "gateway": [TOKENMILL, "gateway", "--open", "--port", str(self.port), *model],
            },
            {
                "TOKENMILL_REDIS_URL": self.redis_url, "TOKENMILL_DATABASE_URL": database,
                "TOKENMILL_QUEUE": "q", "TOKENMILL_MODEL": MODEL, "TOKENMILL_MAX_NUM_SEQS": "256",
                "TOKENMILL_LOG_LEVEL": "warning",
                "PATH": str(Path(sys.executable).parent),
            },
        )  # fmt: skip
        self.process = psutil.Process(self._processes["gateway"].process.pid)

    async def is_ready(self) -> bool:
        try:
            return bool(await self.stream("chat", 2))
        except (OSError, asyncio.IncompleteReadError, IndexError):
            return False

    async def stream(self, kind: str, tokens: int, model: str = MODEL) -> tuple[float, str]:
        """Read one stream to its end; return the time to its first token, and its first event."""
        body: dict[str, Any] = {"model": model, "stream": True, "ignore_eos": True}
        if kind == "chat":
            body |= {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": tokens}
        else:
            body |= {"input": "Go on", "max_output_tokens": tokens}
        return await self.read("POST", PATHS[kind], b'"delta":', body)

    async def read(
        self, method: str, path: str, wanted: bytes, body: dict[str, Any] | None = None
    ) -> tuple[float, str]:
        data = json.dumps(body).encode() if body else b""
        since = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**26)
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(
            f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        )
        try:
            first = await reader.readuntil(wanted)
            seconds = time.monotonic() - since
            while await reader.read(2**20):
                pass
        finally:
            writer.close()
        return seconds, first.partition(b"data: ")[2].decode()

    async def case(self, kind: str, streams: int, tokens: int) -> dict[str, float]:
        if kind == "client alone":
            command = ("-m", __name__, self.redis_url, str(streams), str(tokens))
            child = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=asyncio.subprocess.PIPE
            )
            cpu_s, first_s = json.loads((await child.communicate())[0])
        else:
            before = cpu_seconds(self.process.pid)
            found = await asyncio.gather(*(self.stream(kind, tokens) for _ in range(streams)))
            cpu_s = cpu_seconds(self.process.pid) - before
            first_s = statistics.median(seconds for seconds, _ in found)
        count = streams * tokens
        return {"cpu_us": cpu_s / count * 1e6, "rate": count / cpu_s, "first_ms": first_s * 1e3}

    async def requests(self, kind: str, count: int = 200) -> dict[str, float]:
        before = cpu_seconds(self.process.pid)
        for _ in range(count):
            await self.stream(kind, 1)
        return {"request_ms": (cpu_seconds(self.process.pid) - before) / count * 1e3}

    async def silent(self, count: int, seconds: float = 30.0) -> dict[str, float]:
        memory = self.process.memory_info().rss
        tasks = []
        for _ in range(count):
            tasks.append(asyncio.create_task(self.stream("chat", 1, "nobody")))
            await asyncio.sleep(0.002)
        await asyncio.sleep(15)
        before = cpu_seconds(self.process.pid)
        await asyncio.sleep(seconds)
        cpu = (cpu_seconds(self.process.pid) - before) / seconds
        grown = self.process.memory_info().rss - memory
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {"cpu": cpu, "memory_mb": grown / 1e6}

    async def resume(self, tokens: int = 4_096) -> dict[str, float]:
        _, first = await self.stream("responses", tokens)
        name = json.loads(first.partition("\n")[0])["response"]["id"]
        path = f"/v1/responses/{name}?stream=true&starting_after={tokens}"
        found = [await self.read("GET", path, b"data: ") for _ in range(5)]
        return {"event_ms": statistics.median(seconds for seconds, _ in found) * 1e3}


async def measure(service: Gateway, options: argparse.Namespace) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for streams in options.streams:
        title = f"{streams} streams of {options.tokens} tokens"
        table = tables[title] = {}
        for kind in ("client alone", *PATHS):
            figures = table[kind] = await service.case(kind, streams, options.tokens)
            figures["ratio"] = figures["cpu_us"] / table["client alone"]["cpu_us"]
        show(Console(width=80), title, table, COLUMNS)
        options.keep({"results": tables})
    tables["requests"] = {
        **{f"{kind}, one token": await service.requests(kind) for kind in PATHS},
        "resume behind 4,096 tokens": await service.resume(),
        f"{options.silent:,} silent streams": await service.silent(options.silent),
    }
    show(Console(width=80), "requests", tables["requests"], COLUMNS)
    return tables


def run(options: argparse.Namespace) -> dict[str, object]:
    if options.peer:
        tables: dict[str, Any] = {}
        for title, table in openai_servers.compare(
            Path(vllm_python()), options.streams, options.tokens
        ):
            tables[title] = table
            show(Console(width=80), title, table, COLUMNS)
            options.keep({"results": tables})
        return {"results": tables}
    service = Gateway()
    try:
        return {"results": service.loop.run(measure(service, options))}
    finally:
        service.close()


async def alone(redis_url: str, streams: int, tokens: int) -> tuple[float, float]:
    """Read streams by the client; return the CPU seconds and the median time to a first token."""
    from tokenmill import AsyncClient

    async def one() -> float:
        since, first_s = time.monotonic(), 0.0
        job = await client.submit(prompt="Go on", max_tokens=tokens, ignore_eos=True, stream=True)
        async for _ in client.stream(job):
            first_s = first_s or time.monotonic() - since
        return first_s

    async with AsyncClient(redis_url, queue="q") as client:
        await one()
        before = time.process_time()
        found = await asyncio.gather(*(one() for _ in range(streams)))
        return time.process_time() - before, statistics.median(found)


if __name__ == "__main__":
    import uvloop

    print(json.dumps(uvloop.run(alone(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
