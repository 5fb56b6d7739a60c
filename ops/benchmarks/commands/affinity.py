"""`ops/bench affinity`: what sessions save when two workers answer chats, and what they cost.

Chats of several turns go to two workers with the synthetic engine, whose step takes as long as a
Llama-3-8B's on a GPU: first without sessions, as jobs were claimed before there were any, then with
them; last to one worker alone. Waste is the time in which a job waits and a worker has none.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from ops.benchmarks.measure.tables import show
from ops.benchmarks.peers.service import TOKENMILL, MeasuredService
from tokenmill import AsyncClient
from tokenmill.transport.connect import connect_async
from tokenmill.transport.repairs import end_task
from tokenmill_schemas.keys import Keys
from tokenmill_worker.record import migrate

MODEL = "synthetic?step_ms=8&token_us=28&length=16384"
COLUMNS = {
    "hits": ("prefix\nhits", "{:.1%}"), "share": ("of one\nworker's", "{:.1%}"),
    "first_ms": ("first token\nms p50", "{:.0f}"), "less": ("\nless", "{:.0%}"),
    "first_p99_ms": ("\np99", "{:.0f}"), "wasted_ms": ("waste\nms", "{:.0f}"),
    "wall_s": ("\ns", "{:.1f}"),
}  # fmt: skip
SAMPLE_S = 0.002
WIDTH = 16  # letters of a bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--letters", type=int, default=400, help="of each question")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between turns")
    parser.add_argument("--rounds", type=int, default=3)


class Workers(MeasuredService):
    """Two workers of queue `two`, and one of queue `one`."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.url = f"unix://{self.socket}"
        database = f"sqlite:///{self.folder}/results.db"
        migrate.upgrade(database)
        command = [TOKENMILL, "worker", "--queue"]
        self.start(
            {name: [*command, name[:3]] for name in ("two-a", "two-b", "one")},
            {
                "TOKENMILL_REDIS_URL": self.url, "TOKENMILL_DATABASE_URL": database,
                "TOKENMILL_MODEL": model, "TOKENMILL_MAX_NUM_SEQS": "256",
                "TOKENMILL_LOG_LEVEL": "warning", "PATH": str(Path(sys.executable).parent),
            },
        )  # fmt: skip

    async def is_ready(self) -> bool:
        found = 0
        for queue in ("two", "one"):
            async with AsyncClient(self.url, queue=queue) as client:
                found += sum(bool(each.model) for each in await client.workers())
        return found == 3

    async def case(
        self, queue: str, options: argparse.Namespace, has_sessions: bool
    ) -> dict[str, Any]:
        """Run all chats, and return the figures of their turns."""
        tenant, chance = self._tenant(), random.Random(7)
        first_s: list[float] = []
        usages: list[list[Any]] = [[] for _ in range(options.turns)]

        async def chat(client: AsyncClient, number: int, pauses: list[float]) -> None:
            text = f"{number} "
            for turn, pause in enumerate(pauses):
                await asyncio.sleep(pause)
                text += f"{turn} {number} " * (options.letters // 6)
                since, first = time.monotonic(), 0.0
                session = f"chat {number}" if has_sessions else ""
                job = await client.submit(
                    prompt=text, max_tokens=options.tokens, ignore_eos=True, tenant=tenant,
                    priority="interactive", session=session,
                )  # fmt: skip
                async for chunk in client.stream(job):
                    if chunk.token_ids and not first:
                        first = time.monotonic() - since
                    text += chunk.text
                if turn:  # nobody has the first one's prefix
                    first_s.append(first)
                    usages[turn].append((await client.result(job)).usage)

        async with AsyncClient(self.url, queue=queue) as client:
            watch = asyncio.create_task(self._watch(queue))
            began = time.monotonic()
            draws = [
                [chance.expovariate(1 / options.pause) for _ in range(options.turns)]
                for _ in range(options.chats)
            ]
            await asyncio.gather(*(chat(client, n, pauses) for n, pauses in enumerate(draws)))
            wall_s = time.monotonic() - began
            await end_task(watch)
        cuts = statistics.quantiles(first_s, n=100)
        return {
            "hits": _hits(chain(*usages)),
            "by_turn": [_hits(turn) for turn in usages[1:]],
            "first_ms": cuts[49] * 1e3, "first_p99_ms": cuts[98] * 1e3,
            "wasted_ms": self._wasted_s * 1e3, "wall_s": wall_s,
        }  # fmt: skip

    async def _watch(self, queue: str) -> None:
        """Add up the time in which a job waits while a worker has none."""
        self._wasted_s, keys = 0.0, Keys(queue)
        async with connect_async(self.url) as redis:
            members: Any = await redis.smembers(keys.workers)
            names = [name.decode() for name in members]
            last = time.monotonic()
            while True:
                async with redis.pipeline(transaction=True) as pipeline:
                    pipeline.hget(keys.meta, "queued:interactive")
                    for name in names:
                        pipeline.exists(keys.owned(name))
                    waiting, *owners = await pipeline.execute()
                now = time.monotonic()
                if int(waiting or 0) > 0 and not all(owners):
                    self._wasted_s += now - last
                last = now
                await asyncio.sleep(SAMPLE_S)


def _hits(usages: Iterable[Any]) -> float:
    found = [(usage.cached_tokens, usage.prompt_tokens) for usage in usages]
    return float(sum(cached for cached, _ in found) / sum(prompt for _, prompt in found))


def _picture(table: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw the share of hits by turn: a bar of WIDTH letters is all of a prompt."""
    lines = [" turn  " + "  ".join(f"{case:<{WIDTH + 5}}" for case in table)]
    for turn, hits in enumerate(
        zip(*(each["by_turn"] for each in table.values()), strict=True), start=2
    ):
        bars = (f"{'█' * round(hit * WIDTH):<{WIDTH}} {hit:>4.0%}" for hit in hits)
        lines.append(f"{turn:>5}  " + "  ".join(bars))
    return "\n".join(lines)


CASES: Mapping[str, tuple[str, bool]] = {
    "two, without sessions": ("two", False),
    "two, with sessions": ("two", True),
    "one, without sessions": ("one", False),
}


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    by_turn = zip(*(each["by_turn"] for each in found), strict=True)
    names = [name for name in found[0] if name != "by_turn"]
    return {
        **{name: statistics.median(each[name] for each in found) for name in names},
        "by_turn": [statistics.median(hits) for hits in by_turn],
    }


async def measure(service: Workers, options: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for number in range(options.rounds):
        for case, (queue, has_sessions) in list(CASES.items())[:: 1 if number % 2 == 0 else -1]:
            rounds[case].append(await service.case(queue, options, has_sessions))
    table = {case: _medians(found) for case, found in rounds.items()}
    before, _, one = table.values()
    for figures in table.values():
        figures["share"] = figures["hits"] / one["hits"]
        figures["less"] = 1 - figures["first_ms"] / before["first_ms"]
    title = f"{options.chats} chats of {options.turns} turns"
    show(Console(width=80), title, table, COLUMNS)
    print(_picture(table))
    return {"results": {title: table}, "rounds": rounds}


def run(options: argparse.Namespace) -> dict[str, object]:
    service = Workers(options.model)
    try:
        return service.loop.run(measure(service, options))
    finally:
        service.close()
