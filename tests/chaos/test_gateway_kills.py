"""Streams, background responses, conversations and a batch survive the end of every process.

Gateways, worker, tasks, Valkey and PostgreSQL are killed in turn. Each client goes on at another
gateway with the last number that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.chaos.processes import WorkerProcess
from tests.support.marks import LONG
from tests.support.postgres import PostgresServer
from tests.support.valkey import ControlledValkey
from tests.support.waiting import until
from tests.support.worker import QUEUE
from tokenmill.sql.engine import open_engine
from tokenmill_schemas.tables import batches
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.record import migrate

pytestmark = [
    pytest.mark.redis, pytest.mark.postgres, pytest.mark.chaos, pytest.mark.timeout(3_600),
]  # fmt: skip
MODEL = "synthetic?step_ms=25"
TOKENS = 200
AT_ONCE = 24
TURNS = 3
MOST_LINES = 100  # of the batch
PROMPTS = [f"Tell {what}" for what in ("one", "two", "three", "four", "five", "six")]


class Site:
    """Two gateways, a worker, tasks and their servers: each may be killed and started again."""

    def __init__(self, valkey: ControlledValkey, postgres: PostgresServer, folder: Path) -> None:
        self.valkey = valkey
        self.postgres = postgres
        self._folder = folder
        self._database = postgres.create_database()
        migrate.upgrade(self._database)
        self._ports = [free_port(), free_port()]
        self._gateways = [self._start_gateway(port) for port in self._ports]
        self._names = itertools.count()
        self._worker = self._start_worker()
        self._tasks = self._start_tasks()
        self.num_events = 0  # that its readers have received
        self._clients = [
            AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            for port in self._ports
        ]

    def _start_gateway(self, port: int) -> GuardedProcess:
        command = [
            str(Path(sys.executable).parent / "tokenmill"), "gateway", "--open",
            "--port", str(port), "--redis-url", self.valkey.url,
            "--database-url", self._database, "--model", f"{MODEL}={QUEUE}",
            "--files", str(self._folder / "files"),
        ]  # fmt: skip
        with (self._folder / f"gateway-{port}.log").open("ab") as output:
            return GuardedProcess(command, cwd=self._folder, output=output)

    def _start_worker(self) -> WorkerProcess:
        name = f"worker{next(self._names)}"
        return WorkerProcess(
            name, self.valkey.url, self._database, self._folder / f"{name}.log",
            model=MODEL, patient=True, max_crashes=10_000,
        )  # fmt: skip

    def _start_tasks(self) -> GuardedProcess:
        variables = os.environ | {  # noqa: TID251 - the child's
            "TOKENMILL_REDIS_URL": self.valkey.url,
            "TOKENMILL_DATABASE_URL": self._database,
            "TOKENMILL_FILES": str(self._folder / "files"),
            "TOKENMILL_QUEUE": QUEUE,
        }
        command = [str(Path(sys.executable).parent / "tokenmill"), "tasks"]
        with (self._folder / "tasks.log").open("ab") as output:
            return GuardedProcess(command, cwd=self._folder, env=variables, output=output)

    def client(self) -> AsyncOpenAI:
        return random.choice(self._clients)

    async def kill_gateway(self) -> None:
        place = random.randrange(2)
        self._gateways[place].process.kill()
        await asyncio.to_thread(self._gateways[place].process.wait)
        self._gateways[place] = self._start_gateway(self._ports[place])

    async def stop_gateway(self) -> None:
        place = random.randrange(2)
        await until(partial(listens, self._ports[place]))  # before, the signal would kill it
        self._gateways[place].process.terminate()
        assert await asyncio.to_thread(self._gateways[place].process.wait, 60) == 0
        self._gateways[place] = self._start_gateway(self._ports[place])

    async def kill_worker(self) -> None:
        self._worker.kill()
        await self._worker.wait()
        self._worker = self._start_worker()

    async def kill_tasks(self) -> None:
        self._tasks.process.kill()
        await asyncio.to_thread(self._tasks.process.wait)
        self._tasks = self._start_tasks()

    def end_leases(self) -> None:
        """Let the time of every batch's lease pass."""
        engine = open_engine(self._database)
        with engine.begin() as connection:
            held = batches.update().where(batches.c.due_ms.is_not(None))
            connection.execute(held.values(due_ms=0))
        engine.dispose()

    async def kill_valkey(self) -> None:
        await asyncio.to_thread(self.valkey.restart, crash=True)

    async def kill_postgres(self) -> None:
        await asyncio.to_thread(self.postgres.restart, crash=True)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for guarded in (*self._gateways, self._tasks):
            guarded.process.kill()
            await asyncio.to_thread(guarded.process.wait)
        self._worker.kill()
        await self._worker.wait()


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@contextlib.asynccontextmanager
async def running_site(
    valkey: ControlledValkey, postgres: PostgresServer, folder: Path
) -> AsyncIterator[Site]:
    site = Site(valkey, postgres, folder)
    try:
        yield site
    finally:
        await site.close()


def body(key: str, prompt: str) -> dict[str, Any]:
    return {
        "model": MODEL, "input": prompt, "max_output_tokens": TOKENS, "temperature": 0,
        "extra_headers": {"Idempotency-Key": key}, "extra_body": {"ignore_eos": True},
        "timeout": 30,
    }  # fmt: skip


async def persistent(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a call returns, tried again while a server is away."""
    while True:
        try:
            return await call()
        except (openai.APIConnectionError, openai.InternalServerError):
            await asyncio.sleep(0.1)


async def read_stream(site: Site, key: str, prompt: str) -> list[Any]:
    """Return the events of a response, whose reader goes on behind the last that it has."""
    events: list[Any] = []
    while not events or events[-1].type not in ("response.incomplete", "response.completed"):
        client = site.client().responses
        try:
            if not events:
                stream = await client.create(stream=True, **body(key, prompt))
            else:
                stream = await client.retrieve(
                    events[0].response.id, stream=True, timeout=30,
                    starting_after=events[-1].sequence_number,
                )  # fmt: skip
            async with stream:
                async for event in stream:
                    events.append(event)
                    site.num_events += 1
        except (openai.APIError, OSError) as error:
            if getattr(error, "status_code", 503) < 500:
                raise
            await asyncio.sleep(0.1)
        except Exception as error:  # of the transport below OpenAI's client: the stream broke off
            if not type(error).__module__.startswith("httpx"):
                raise
    return events


async def read_background(site: Site, key: str, prompt: str) -> str:
    asked = body(key, prompt)
    made = await persistent(lambda: site.client().responses.create(background=True, **asked))
    while made.status in ("queued", "in_progress"):
        await asyncio.sleep(0.2)
        made = await persistent(partial(retrieve, site, made.id))
    return str(made.output_text)


async def converse(site: Site, key: str) -> list[str]:
    said: list[str] = []
    previous: Any = openai.NOT_GIVEN
    for turn in range(TURNS):
        asked = body(f"{key}-{turn}", PROMPTS[turn]) | {"previous_response_id": previous}
        answer = await persistent(partial(ask, site, asked))
        said.append(answer.output_text)
        previous = answer.id
    return said


async def begin_batch(site: Site, num_lines: int) -> str:
    """Begin a batch whose lines are the prompts in turn; return its id."""
    asked = {"model": MODEL, "max_output_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/responses",
         "body": asked | {"input": PROMPTS[number % len(PROMPTS)]}}
        for number in range(num_lines)
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await persistent(
        lambda: site.client().files.create(file=("in.jsonl", content), purpose="batch")
    )
    batch = await persistent(
        lambda: site.client().batches.create(
            input_file_id=file.id, endpoint="/v1/responses", completion_window="24h",
            extra_headers={"Idempotency-Key": "batch"},
        )
    )  # fmt: skip
    return str(batch.id)


async def answers_of(site: Site, batch_id: str) -> list[tuple[int, str]]:
    """Wait for the end of a batch; return the number and the text of each answer."""

    async def now() -> Any:
        return await persistent(lambda: site.client().batches.retrieve(batch_id))

    async def is_over() -> bool:
        return (await now()).status not in ("validating", "in_progress", "finalizing")

    await until(is_over, timeout_s=600, pause_s=0.2)
    done = await now()
    assert (done.status, done.error_file_id) == ("completed", None)
    content = await persistent(lambda: site.client().files.content(done.output_file_id))
    found = []
    for line in map(json.loads, content.text.splitlines()):
        (item,) = line["response"]["body"]["output"]
        found.append((int(line["custom_id"]), item["content"][0]["text"]))
    return found


async def retrieve(site: Site, response_id: str) -> Any:
    return await site.client().responses.retrieve(response_id, timeout=30)


async def ask(site: Site, asked: dict[str, Any]) -> Any:
    return await site.client().responses.create(**asked)


def text_of(events: list[Any]) -> str:
    """Return the text of a stream, whose numbers have no gap and no repeat."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) == TOKENS
    assert "".join(deltas) == events[-1].response.output_text
    return "".join(deltas)


async def test_answers_are_the_same_after_every_process_was_killed(
    make_valkey: Callable[..., ControlledValkey],
    own_postgres: PostgresServer,
    tmp_path: Path,
    rounds: int,
) -> None:
    """Six streams, and in the long form five a round: 1,000 with `--rounds 200`.

    A process is killed a moment after readers have received events again: time alone would leave a
    busy machine no moment between two kills.
    """
    numbers, pauses_s = range(6), (0.05, 0.3)
    if rounds >= LONG:
        numbers, pauses_s = range(5 * rounds), (0.2, 1.0)
    valkey = make_valkey(settings={"appendfsync": "always"})
    async with running_site(valkey, own_postgres, tmp_path) as site:
        calm_said, *streams = await asyncio.gather(
            converse(site, "calm"), *(read_stream(site, prompt, prompt) for prompt in PROMPTS)
        )
        calm = [text_of(events) for events in streams]
        limiter = asyncio.Semaphore(AT_ONCE)

        async def answers(number: int) -> tuple[str, str]:
            prompt = PROMPTS[number % len(PROMPTS)]
            async with limiter:
                events, text = await asyncio.gather(
                    read_stream(site, f"stream {number}", prompt),
                    read_background(site, f"background {number}", prompt),
                )
                return text_of(events), text

        num_lines = min(len(numbers), MOST_LINES)
        batch = await begin_batch(site, num_lines)
        work = asyncio.gather(converse(site, "killed"), *map(answers, numbers))
        faults = itertools.cycle(
            (site.kill_gateway, site.kill_worker, site.kill_valkey, site.kill_postgres,
             site.kill_tasks, site.stop_gateway)  # which waits while plain answers end
        )  # fmt: skip
        num_faults = 0

        def goes_on(num_before: int) -> bool:
            return work.done() or site.num_events > num_before

        try:
            while not work.done():
                num_before = site.num_events
                await until(partial(goes_on, num_before), timeout_s=600)
                await asyncio.wait((work,), timeout=random.uniform(*pauses_s))
                if not work.done():
                    await next(faults)()
                    num_faults += 1
            said, *found = await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        await asyncio.to_thread(site.end_leases)
        lines = await answers_of(site, batch)
    assert said == calm_said
    assert found == [(calm[number % len(calm)],) * 2 for number in numbers]
    expected = [(number, calm[number % len(calm)]) for number in range(num_lines)]
    assert sorted(lines) == expected
    assert num_faults >= 6
