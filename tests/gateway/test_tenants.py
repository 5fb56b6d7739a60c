"""Three tenants call everything with the ids of all: nobody sees, changes or removes what belongs
to another.

`--rounds 100` is the long form: 10,000 calls.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from tests.gateway.conftest import MODEL, SLOW, new_key, running_gateway
from tests.support.waiting import until
from tests.support.worker import QUEUE, client_of, running_worker
from tokenmill_gateway.app import ALL_CALLS
from tokenmill_gateway.openapi import Call

pytestmark = [pytest.mark.redis, pytest.mark.timeout(3_600)]
TENANTS = ("red", "green", "blue")
CALLS = [call for call in ALL_CALLS if not call.is_public]
UNKNOWN = {
    "resp": "resp_01a22303-9cf8-7bcc-a910-a8c23f13e97a",
    "chatcmpl": "chatcmpl-01a22303-9cf8-7bcc-a910-a8c23f13e97a",
    "file": "file-0123456789abcdef01234567",
    "batch": "batch_0123456789abcdef01234567",
}
KIND_IN_PATH = {"response_id": ("resp", "chatcmpl"), "file_id": ("file",), "batch_id": ("batch",)}
LENGTH = {"max_output_tokens": 1}
ENDLESS = {"max_output_tokens": 4_000, "ignore_eos": True}  # of 20 ms a token
IDS = re.compile(r"(resp_|chatcmpl-|cmpl-|file-|batch_)([0-9a-f-]{24,36})")


def word_of(tenant: str) -> str:
    """Return the word that stands in all that a tenant sends, and nowhere else."""
    return f"secret-of-{tenant}"


class Tenant:
    """One tenant: its client, and the ids of what it has, by kind."""

    def __init__(self, name: str, http: httpx.AsyncClient) -> None:
        self.name, self.http = name, http
        self.ids: dict[str, list[str]] = {kind: [] for kind in UNKNOWN}
        self.kept: list[str] = []  # that it never deletes itself

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def upload(self) -> str:
        body = {"model": MODEL, "prompt": word_of(self.name), "max_tokens": 1}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        content = json.dumps(line).encode()
        file = ("file", (f"{word_of(self.name)}.jsonl", content))
        answer = await self.http.post("/v1/files", data={"purpose": "batch"}, files=[file])
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def fill(self) -> None:
        """Make two of each kind, of which the first is kept: also an answer that runs."""
        word = word_of(self.name)
        more = {"input": word, "metadata": {"word": word}}
        asked = [{"model": MODEL, **more, **LENGTH}] * 2
        asked += [{"model": SLOW, **more, "background": True, **ENDLESS}] * 2
        for body in asked:
            self.ids["resp"].append((await self.post("/v1/responses", body))["id"])
        chat = {"model": MODEL, "messages": [{"role": "user", "content": word}], "max_tokens": 1}
        for _ in range(2):
            self.ids["chatcmpl"].append((await self.post("/v1/chat/completions", chat))["id"])
            file = await self.upload()
            self.ids["file"].append(file)
            batch = {"input_file_id": file, "endpoint": "/v1/completions"}
            batch |= {"completion_window": "24h", "metadata": {"word": word}}  # type: ignore[dict-item]
            self.ids["batch"].append((await self.post("/v1/batches", batch))["id"])
        self.kept = [found[0] for found in self.ids.values()]


@contextlib.asynccontextmanager
async def filled(redis_url: str, database: str, folder: Path) -> AsyncIterator[list[Tenant]]:
    """Three tenants before one gateway, each with things of its own."""
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(running_worker(redis_url, database))
        await enter(running_worker(redis_url, database, model=SLOW, queue="slow"))
        gateway = await enter(
            running_gateway(
                redis_url,
                database,
                is_open=False,
                models={MODEL: QUEUE, SLOW: "slow"},
                files=str(folder / "files"),
            )
        )
        tenants = []
        for name in TENANTS:
            head = {"Authorization": f"Bearer {new_key(database, name)}"}
            http = httpx.AsyncClient(base_url=gateway.url, headers=head, timeout=60)
            tenants.append(Tenant(name, await enter(http)))
            await tenants[-1].fill()
        yield tenants
        for tenant in tenants:
            for shown in tenant.ids["resp"]:
                await tenant.http.post(f"/v1/responses/{shown}/cancel")


class Draw:
    """Draws calls, sends them, and checks what comes back."""

    def __init__(self, tenants: list[Tenant], seed: int) -> None:
        self.random = random.Random(seed)
        self.tenants = tenants
        self.owners = {
            IDS.sub(r"\2", shown): tenant
            for tenant in tenants
            for found in tenant.ids.values()
            for shown in found
        }
        self.statuses: Counter[int] = Counter()
        self.calls = self.foreign = 0

    async def step(self) -> None:
        """Send one call; one with a foreign id also with an unknown one, which fares alike."""
        caller = self.random.choice(self.tenants)
        owner = self.random.choice(self.tenants)
        call = self.random.choice(CALLS)
        kinds = next((KIND_IN_PATH[n] for n in KIND_IN_PATH if f"{{{n}" in call.path), None)
        kind = self.random.choice(kinds or tuple(UNKNOWN))
        shown = self.random.choice(owner.ids[kind])
        is_own = owner is caller
        if is_own and call.method == "DELETE" and shown in caller.kept:
            return
        answer = await self.send(caller, call, shown, is_own=is_own)
        self.check(caller, answer, shown)
        self.note(caller, call, answer)
        if is_own:
            if call.method == "DELETE" and answer.status_code == 200:
                caller.ids[kind].remove(shown)
                caller.ids[kind] += [] if caller.ids[kind] else [UNKNOWN[kind]]
            return
        other = await self.send(caller, call, UNKNOWN[kind], is_own=False)
        self.check(caller, other, UNKNOWN[kind])
        if self.has_id(call):
            self.foreign += 1
            assert answer.status_code == other.status_code, (call, answer.text, other.text)
            assert answer.status_code in (400, 404), (call, answer.text)
            assert answer.text.replace(shown, "ID") == other.text.replace(UNKNOWN[kind], "ID")

    def has_id(self, call: Call) -> bool:
        """Say if a call names an id: in its path, or in the query or body that `send` makes."""
        return "{" in call.path.replace("{model", "") or call.path == "/v1/responses"

    async def send(self, caller: Tenant, call: Call, shown: str, *, is_own: bool) -> httpx.Response:
        path, query = call.path, dict[str, str]()
        options: dict[str, Any] = {}
        made: dict[str, Any]
        for name in (*KIND_IN_PATH, "model:path"):
            path = path.replace(f"{{{name}}}", MODEL if name == "model:path" else shown)
        word = word_of(caller.name)
        if call.path == "/v1/files" and call.method == "POST":
            options = {"data": {"purpose": "batch"}, "files": [("file", (f"{word}.txt", b"x"))]}
        elif call.path == "/v1/batches" and call.method == "POST":
            made = {"input_file_id": shown, "endpoint": "/v1/completions"}
            options = {"json": {**made, "completion_window": "24h"}}
        elif call.path == "/v1/responses":
            made = {"model": MODEL, "input": word, **LENGTH, "previous_response_id": shown}
            options = {"json": made}
        elif call.path == "/v1/chat/completions":
            made = {"model": MODEL, "messages": [{"role": "user", "content": word}]}
            options = {"json": {**made, "max_tokens": 1}}
        elif call.path == "/v1/completions":
            options = {"json": {"model": MODEL, "prompt": word, "max_tokens": 1}}
        elif call.path in ("/v1/files", "/v1/batches"):
            query = {"limit": str(self.random.randint(1, 9))}
            query |= {"after": shown} if self.random.random() < 0.5 else {}
        elif call.path.endswith("usage/completions"):
            query = {"start_time": "0", "limit": "1"}
        elif call.path.endswith("{response_id}") and call.method == "GET" and not is_own:
            query = {"stream": "true"} if self.random.random() < 0.5 else {}
        self.calls += 1
        return await caller.http.request(call.method, path, params=query, **options)

    def note(self, caller: Tenant, call: Call, answer: httpx.Response) -> None:
        """Draw what a call has made from now on, in the place of what was made before."""
        if call.method != "POST" or "{" in call.path or answer.status_code != 200:
            return
        shown = answer.json()["id"]
        self.owners[IDS.sub(r"\2", shown)] = caller
        kind = shown.replace("_", "-").partition("-")[0]
        if kind in caller.ids:
            caller.ids[kind].append(shown)
            if len(caller.ids[kind]) > 12:
                del caller.ids[kind][4]

    def check(self, caller: Tenant, answer: httpx.Response, sent: str) -> None:
        """Hold an answer against all that others have."""
        self.statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        text = answer.text + str(answer.headers)
        for other in self.tenants:
            if other is not caller:
                assert word_of(other.name) not in text
        own = IDS.sub(r"\2", sent)
        for match in IDS.finditer(text):
            assert self.owners.get(match[2], caller) is caller or match[2] == own, text


async def test_three_tenants_see_nothing_of_each_other_in_any_call(
    redis_url: str, database: str, tmp_path: Path, rounds: int, allowed_keys: list[str]
) -> None:
    allowed_keys += ["tm:{*}:meta"]
    wanted, seed = max(300, 100 * rounds), random.randrange(1 << 32)
    async with filled(redis_url, database, tmp_path) as tenants:
        draw = Draw(tenants, seed)
        while draw.calls < wanted:
            await draw.step()
        print(f"seed {seed}: {draw.calls} calls, {draw.foreign} pairs, {dict(draw.statuses)}")  # noqa: T201
        assert draw.foreign > wanted / 8
        for tenant in tenants:  # nobody has removed anything of theirs
            for shown in tenant.kept:
                kind = shown.replace("_", "-").partition("-")[0]
                room = {"file": "files", "batch": "batches"}.get(kind, "responses")
                found = await tenant.http.get(f"/v1/{room}/{shown}")
                assert found.status_code == (404 if kind == "chatcmpl" else 200), found.text
            await wait_for_own_usage(tenant, database)


async def wait_for_own_usage(tenant: Tenant, database: str) -> None:
    """Wait until a tenant's usage is what SQL has of it."""
    today = round(time.time())

    async def is_so() -> bool:
        path = f"/v1/organization/usage/completions?start_time={today}"
        buckets = (await tenant.http.get(path)).json()["data"]
        told = sum(each["num_model_requests"] for one in buckets for each in one["results"])
        engine = sa.create_engine(database)
        with engine.connect() as connection:
            rows = connection.execute(
                sa.text("SELECT count(*) FROM usage WHERE tenant = :name"), {"name": tenant.name}
            ).scalar_one()
        engine.dispose()
        return bool(rows and told == rows)

    await until(is_so)


@contextlib.contextmanager
def statements() -> Iterator[list[str]]:
    """Yield the SQL statements of this process, as they come."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "api_keys" not in statement:  # remembered for a while
            seen.append(statement)

    sa.event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        sa.event.remove(Engine, "before_cursor_execute", note)


async def work_of(queue: Any, seen: list[str], http: httpx.AsyncClient, path: str) -> Any:
    """Return the SQL statements and the numbers of Redis commands of one look-up."""
    before = await commands(queue)
    del seen[:]
    answer = await http.get(path)
    assert answer.status_code == 404, answer.text
    after = await commands(queue)
    done = {name: after[name] - before.get(name, 0) for name in after if name != "cmdstat_info"}
    return sorted(seen), {name: count for name, count in done.items() if count}


async def commands(queue: Any) -> dict[str, int]:
    found = await queue._redis.info("commandstats")
    return {name: int(values["calls"]) for name, values in found.items()}


@pytest.mark.slow
async def test_a_foreign_id_takes_the_work_of_an_unknown_one(
    redis_url: str, database: str, tmp_path: Path, rounds: int, allowed_keys: list[str]
) -> None:
    """Commands and statements are compared; medians are printed, of 2,000 from `--rounds 100`."""
    allowed_keys += ["tm:{*}:meta"]
    repeats = 20 * rounds
    async with (
        filled(redis_url, database, tmp_path) as (mine, theirs, _),
        client_of(redis_url, database) as queue,
    ):
        asked = {
            "ended response": ("/v1/responses/", theirs.ids["resp"][0], UNKNOWN["resp"]),
            "running response": ("/v1/responses/", theirs.ids["resp"][2], UNKNOWN["resp"]),
            "file": ("/v1/files/", theirs.ids["file"][0], UNKNOWN["file"]),
            "batch": ("/v1/batches/", theirs.ids["batch"][0], UNKNOWN["batch"]),
        }
        for name, (path, *ids) in asked.items():
            times: tuple[list[float], list[float]] = ([], [])
            for number in range(repeats):
                for place in (0, 1) if number % 2 else (1, 0):
                    began = time.perf_counter()
                    await mine.http.get(path + ids[place])
                    times[place].append(time.perf_counter() - began)
            foreign, unknown = (1e3 * statistics.median(each) for each in times)
            print(f"{name}: foreign {foreign:.3f} ms, unknown {unknown:.3f} ms (medians)")  # noqa: T201
        for tenant in (theirs, mine):  # so that no worker sends commands of its own
            for shown in tenant.ids["resp"]:
                await tenant.http.post(f"/v1/responses/{shown}/cancel")
                await until(partial(is_over, tenant.http, shown))
        with statements() as seen:
            for path, foreign_id, unknown_id in asked.values():
                first = await quiet(queue, seen, mine.http, path + foreign_id)
                assert first == await quiet(queue, seen, mine.http, path + unknown_id), path


async def is_over(http: httpx.AsyncClient, shown_id: str) -> bool:
    answer = await http.get(f"/v1/responses/{shown_id}")
    return answer.json().get("status") not in ("queued", "in_progress")


async def quiet(queue: Any, seen: list[str], http: httpx.AsyncClient, path: str) -> Any:
    """Return the least of the work that a look-up was seen with, beside the workers' heartbeats."""
    found = [await work_of(queue, seen, http, path) for _ in range(12)]
    return min(found, key=lambda each: (len(each[0]), sum(each[1].values())))
