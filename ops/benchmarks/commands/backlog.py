"""`ops/bench backlog`: what the server takes per job, with many jobs waiting and with none.

Each case has a server of its own, so that an empty queue does not share its memory with a full
one. All servers run at once and take turns: in a turn some jobs are submitted, then as many are
claimed, by two workers one at a time. The time is that which the server counts for scripts. A case
is compared with that of an empty queue turn by turn, so that the machine's speed cancels out.
"""

import argparse
import asyncio
import signal
import statistics
from contextlib import AsyncExitStack
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress

from ops.benchmarks.measure.tables import show
from tokenmill import AsyncClient
from tokenmill.transport.connect import connect_async
from tokenmill_schemas.keys import Keys
from tokenmill_worker.local.valkey_server import ValkeyServer
from tokenmill_worker.queue.job_stream import JobStream

QUEUE = "backlog"
BATCH = 8_192  # jobs of one call while a queue is filled
COLUMNS = {
    "claim_us": ("µs a\nclaim", "{:.0f}"), "claim_ratio": ("of\nnone", "{:.2f}"),
    "submit_us": ("µs a\nsubmit", "{:.1f}"), "submit_ratio": ("of\nnone", "{:.2f}"),
    "calls": ("claims\na job", "{:.2f}"), "memory_mib": ("MiB", "{:.0f}"),
}  # fmt: skip
CALLS = ("evalsha", "eval")
Figures = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1_000_000, help="that wait in a full queue")
    parser.add_argument("--sessions", type=int, default=1_000, help="of which the jobs are turns")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--claims", type=int, default=256, help="jobs of a turn")


class Case:
    """A server with one queue, two workers that have served it, and a number of waiting jobs."""

    def __init__(self, waiting: int, sessions: int) -> None:
        self.name = f"{waiting:,} wait" if waiting else "none waits"
        self.name += f", {sessions:,} sessions" if sessions else ""
        self.waiting, self.turns = waiting, list[Figures]()
        self._sessions, self._undo, self._submitted = sessions, AsyncExitStack(), 0

    async def open(self) -> Self:
        # no rewrite of the log, which would copy the memory of a full server while it is measured
        server = ValkeyServer(
            settings={"auto-aof-rewrite-percentage": "0"}, at_death=signal.SIGKILL
        ).start()
        self._undo.callback(server.stop)
        self._client = await self._undo.enter_async_context(AsyncClient(server.url, queue=QUEUE))
        self._redis = await self._undo.enter_async_context(connect_async(server.url))
        keys = Keys(QUEUE)
        await self._redis.hset(keys.meta, "served", 1)
        self._workers = [JobStream(self._redis, keys, name) for name in ("a", "b")]
        return self

    async def close(self) -> None:
        await self._undo.aclose()

    async def submit(self, count: int) -> None:
        numbers = range(self._submitted, self._submitted + count)
        self._submitted += count
        await self._client.submit_many(
            {"prompt": "x", "session": f"s{n % self._sessions}" if self._sessions else ""}
            for n in numbers
        )

    async def turn(self, count: int) -> None:
        """Submit and claim this number of jobs, and note what the server took for each."""
        before = await self._scripts_s()
        await self.submit(count)
        between, claimed, calls = await self._scripts_s(), 0, 0
        while claimed < count:
            claimed += len(await self._workers[calls % 2].claim(1))
            calls += 1
        after = await self._scripts_s()
        self.turns.append(
            {
                "submit_us": (between - before) / count * 1e6,
                "claim_us": (after - between) / claimed * 1e6, "calls": calls / claimed,
            }
        )  # fmt: skip

    async def memory_mib(self) -> float:
        return float((await self._redis.info("memory"))["used_memory"]) / 2**20

    async def _scripts_s(self) -> float:
        found = await self._redis.info("commandstats")
        return 1e-6 * sum(int(found.get(f"cmdstat_{name}", {}).get("usec", 0)) for name in CALLS)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    cases = [Case(jobs, n) for n in (0, options.sessions) for jobs in (0, options.jobs)]
    async with AsyncExitStack() as undo:
        for case in cases:
            undo.push_async_callback((await case.open()).close)
        with Progress(transient=True) as progress:
            for case in cases:
                bar = progress.add_task(f"fill: {case.name}", total=case.waiting)
                for first in range(0, case.waiting, BATCH):
                    await case.submit(min(BATCH, case.waiting - first))
                    progress.update(bar, completed=first)
        for case in cases:  # not counted: the server compiles its scripts
            await case.turn(options.claims)
            case.turns.clear()
        for number in range(options.rounds):
            for case in cases[:: 1 if number % 2 == 0 else -1]:
                await case.turn(options.claims)
        memory = [await case.memory_mib() for case in cases]
    table: dict[str, Figures] = {}
    for place, case in enumerate(cases):
        empty = cases[place - place % 2]
        table[case.name] = {
            name: statistics.median(turn[name] for turn in case.turns) for name in case.turns[0]
        }
        table[case.name]["memory_mib"] = memory[place]
        if case is not empty:
            for kind in ("claim", "submit"):
                table[case.name][f"{kind}_ratio"] = statistics.median(
                    own[f"{kind}_us"] / its[f"{kind}_us"]
                    for own, its in zip(case.turns, empty.turns, strict=True)
                )
    title = f"medians of {options.rounds} turns of {options.claims} jobs"
    show(Console(width=80), title, table, COLUMNS)
    return {"results": {title: table}, "rounds": {case.name: case.turns for case in cases}}


def run(options: argparse.Namespace) -> dict[str, object]:
    return asyncio.run(measure(options))
