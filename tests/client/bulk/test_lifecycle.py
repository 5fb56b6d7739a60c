"""Tests of batches that expire half-way, are cancelled while jobs run, or are interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import Batch as TheirBatch

from tests.client.bulk.support import (
    BulkSetup,
    Interrupted,
    completion,
    interrupt_after,
    names,
    read,
    until,
    write,
    write_many,
)
from tests.support.worker import running_worker
from tokenmill import Client
from tokenmill.bulk import (
    Batch,
    BatchOptions,
    BatchProgress,
    BatchState,
    BatchStore,
    RunLimits,
    cancel_batch,
    export_batch,
    import_batch,
    refresh,
)
from tokenmill.errors import ConfigurationError
from tokenmill.transport.server_clock import ServerClock

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]
SLOW: dict[str, Any] = {
    "model": "synthetic?step_ms=50",
    "aliases": "synthetic=synthetic?step_ms=50",
    "max_num_seqs": 2,
}


@pytest.fixture
def setup(tmp_path: Path, redis_url: str, database: str) -> BulkSetup:
    return BulkSetup(tmp_path, redis_url, database)


def half_endless(path: Path) -> Path:
    """Write a file of short jobs, followed by jobs that take minutes."""
    lines = [completion(f"short-{number}", max_tokens=1) for number in range(6)]
    return write(
        path,
        [*lines, *(completion(f"long-{n}", max_tokens=2000, ignore_eos=True) for n in range(4))],
    )


@pytest.mark.slow
async def test_answers_before_the_completion_window_ends_are_kept_and_other_lines_expire(
    setup: BulkSetup,
) -> None:
    path = half_endless(setup.folder / "in.jsonl")
    async with running_worker(setup.redis_url, str(setup.database), **SLOW):
        batch = await setup.run(path, options=BatchOptions(completion_window="8s"))
    public = TheirBatch.model_validate_json(msgspec.json.encode(batch.public()), strict=True)
    assert public.status == "expired"
    assert public.expired_at
    assert public.request_counts is not None
    answered, expired = names(setup.paths.output), read(setup.paths.errors)
    assert (public.request_counts.completed, public.request_counts.failed) == (
        len(answered),
        len(expired),
    )
    assert answered
    assert {line["error"]["code"] for line in expired} == {"batch_expired"}
    assert {f"long-{number}" for number in range(4)} <= {line["custom_id"] for line in expired}
    assert len({*answered, *(line["custom_id"] for line in expired)}) == 10


async def test_a_batch_is_cancelling_until_its_running_jobs_have_stopped(setup: BulkSetup) -> None:
    path = half_endless(setup.folder / "in.jsonl")
    async with running_worker(setup.redis_url, str(setup.database), **SLOW):
        begun = await asyncio.to_thread(
            setup.do, lambda client, store: import_batch(client, store, path)
        )
        await until(
            lambda: setup.do(_refreshed(begun.id, lambda batch: batch.totals.completed == 6))
        )
        asked = await asyncio.to_thread(
            setup.do, lambda client, store: cancel_batch(client, store, begun.id)
        )
        assert asked.state in (BatchState.CANCELLING, BatchState.CANCELLED)
        assert asked.cancelling_ms
        batch = await until(
            lambda: setup.do(_refreshed(begun.id, lambda batch: batch.state.is_final))
        )
    public = TheirBatch.model_validate_json(msgspec.json.encode(batch.public()), strict=True)
    assert (public.status, public.cancelling_at is not None, public.cancelled_at is not None) == (
        "cancelled",
        True,
        True,
    )
    assert (batch.totals.completed, batch.totals.failed) == (6, 4)
    await asyncio.to_thread(
        setup.do, lambda client, store: export_batch(client, store, begun.id, setup.paths)
    )
    assert len(names(setup.paths.output)) == 6
    assert {line["error"]["code"] for line in read(setup.paths.errors)} == {"batch_cancelled"}


def _refreshed(
    batch_id: str, is_it: Callable[[Batch], bool]
) -> Callable[[Client, BatchStore], Batch | None]:
    def look(client: Client, store: BatchStore) -> Batch | None:
        batch = refresh(client, store, batch_id)
        return batch if is_it(batch) else None

    return look


async def test_an_interrupted_import_continues_its_batch(setup: BulkSetup) -> None:
    path = write_many(setup.folder / "in.jsonl", 70)
    begun: list[str] = []

    def submit(client: Client, store: BatchStore) -> Batch:
        batch = store.get(begun[0]) if begun else None
        limits = RunLimits(
            window=20, on_progress=interrupt_after(10) if batch is None else lambda _: None
        )
        return import_batch(client, store, path, batch=batch, limits=limits)

    async with running_worker(setup.redis_url, str(setup.database)):
        with pytest.raises(Interrupted):
            await asyncio.to_thread(setup.do, submit)
        begun += [
            batch.id for batch in await asyncio.to_thread(setup.do, lambda _, store: store.newest())
        ]
        await asyncio.to_thread(setup.do, submit)
        await until(
            lambda: setup.do(
                _refreshed(begun[0], lambda batch: batch.state is BatchState.COMPLETED)
            )
        )
    await asyncio.to_thread(
        setup.do, lambda client, store: export_batch(client, store, begun[0], setup.paths)
    )
    assert sorted(names(setup.paths.output)) == sorted(f"line-{number}" for number in range(70))


async def test_a_run_interrupted_while_it_ends_is_completed_by_the_next(setup: BulkSetup) -> None:
    path = write_many(setup.folder / "in.jsonl", 30)
    async with running_worker(setup.redis_url, str(setup.database)):
        with pytest.raises(Interrupted):
            await setup.run(path, window=30, on_progress=interrupt_after(1))
        (left,) = await asyncio.to_thread(setup.do, lambda _, store: store.newest())
        await until(lambda: setup.do(lambda _, store: len(list(store.results(left.id))) == 30))
    setup.do(lambda _, store: store.move(left.id, BatchState.FINALIZING, [BatchState.IN_PROGRESS]))
    kept = setup.paths.output.read_bytes()
    with pytest.raises(ConfigurationError, match="continues with"):
        await asyncio.to_thread(
            setup.do, lambda client, store: export_batch(client, store, left.id, setup.paths)
        )
    assert (setup.paths.output.read_bytes(), setup.paths.record.exists()) == (kept, True)
    batch = await setup.run(path)
    assert (batch.state, batch.totals.completed) == (BatchState.COMPLETED, 30)
    assert len(set(names(setup.paths.output))) == 30


async def test_a_run_resumed_too_late_keeps_answers_that_came_in_time(
    setup: BulkSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(progress: BatchProgress) -> None:
        if progress.in_flight:
            raise Interrupted

    path = write_many(setup.folder / "in.jsonl", 30)
    with pytest.raises(Interrupted):
        await setup.run(
            path, options=BatchOptions(completion_window="60s"), window=30, on_progress=interrupt
        )
    async with running_worker(setup.redis_url, str(setup.database)):
        (left,) = await asyncio.to_thread(setup.do, lambda _, store: store.newest())
        await until(lambda: setup.do(lambda _, store: len(list(store.results(left.id))) == 30))
    monkeypatch.setattr(ServerClock, "now_ms", lambda _clock: left.expires_ms + 1)
    batch = await setup.run(path)
    assert (batch.state, batch.totals.completed) == (BatchState.COMPLETED, 30)
    assert len(set(names(setup.paths.output))) == 30
