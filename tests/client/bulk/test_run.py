"""A file through a whole worker with the model-free engine: run, import and export, cancel,
expire, continue.
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import Batch as TheirBatch
from openai.types import Completion as TheirCompletion
from openai.types.chat import ChatCompletion as TheirChat

from tests.client.bulk.support import (
    BulkSetup,
    Interrupted,
    chat,
    completion,
    interrupt_after,
    names,
    numbered,
    read,
    until,
    write,
    write_many,
)
from tests.support.worker import database_url, running_worker
from tokenmill import Client
from tokenmill.bulk import (
    Batch,
    BatchOptions,
    BatchState,
    BatchStore,
    Paths,
    cancel_batch,
    export_batch,
    import_batch,
    refresh,
)
from tokenmill.errors import ConfigurationError

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]


async def test_every_line_is_answered_once_in_openai_s_format(
    setup: BulkSetup, database: str
) -> None:
    lines: list[dict[str, Any] | str] = [numbered(number) for number in range(40)]
    lines += [
        "nonsense",
        chat("line-3"),
        chat("tools", tools=[{}]),
        completion("long", max_tokens=10**6),
        "",
    ]
    path = write(setup.folder / "in.jsonl", lines)
    async with running_worker(setup.redis_url, database):
        batch = await setup.run(path)
    assert batch.state is BatchState.COMPLETED
    assert (batch.totals.completed, batch.totals.failed, batch.total) == (40, 4, 44)
    assert batch.totals.output_tokens == sum(_tokens(line) for line in read(setup.paths.output))
    assert sorted(names(setup.paths.output)) == sorted(f"line-{number}" for number in range(40))
    assert {line["custom_id"] for line in read(setup.paths.errors)} == {
        None,
        "line-3",
        "tools",
        "long",
    }
    for line in read(setup.paths.output):
        kind = (
            TheirChat
            if line["response"]["body"]["object"] == "chat.completion"
            else TheirCompletion
        )
        kind.model_validate(line["response"]["body"], strict=True)
    public = TheirBatch.model_validate_json(msgspec.json.encode(batch.public()), strict=True)
    assert public.request_counts is not None
    assert (public.request_counts.completed, public.request_counts.failed) == (40, 4)


async def test_a_repeated_run_changes_nothing_and_another_input_is_refused(
    tmp_path: Path, redis_url: str, database: str
) -> None:
    setup = BulkSetup(tmp_path, redis_url, database)
    path = write_many(setup.folder / "in.jsonl", 5)
    async with running_worker(setup.redis_url, database):
        first = await setup.run(path)
        before = setup.paths.output.read_bytes()
        assert await setup.run(path) == first
        assert setup.paths.output.read_bytes() == before
        with pytest.raises(ConfigurationError, match="a different input file"):
            await setup.run(write_many(setup.folder / "other.jsonl", 6))
        with pytest.raises(
            ConfigurationError, match="begun with another tenant and any_model: say the same again"
        ):
            await setup.run(path, options=BatchOptions(tenant="acme", any_model=True))
        assert setup.paths.output.read_bytes() == before
    setup.paths.record.unlink()
    with pytest.raises(ConfigurationError, match="there already"):
        await setup.run(path)


async def test_the_queue_never_holds_more_than_the_window(
    tmp_path: Path, redis_url: str, database: str
) -> None:
    setup = BulkSetup(tmp_path, redis_url, None)
    path = write_many(tmp_path / "in.jsonl", 120)
    held: list[int] = []
    is_full = threading.Event()

    def on_progress(progress: Any) -> None:
        held.append(progress.in_flight)
        if progress.in_flight:
            is_full.set()

    task = asyncio.create_task(setup.run(path, window=16, on_progress=on_progress))
    await asyncio.to_thread(is_full.wait, 60)
    async with running_worker(redis_url, database):
        batch = await task
    assert batch.totals.completed == 120
    assert max(held) == 16


def _tokens(line: dict[str, Any]) -> int:
    return int(line["response"]["body"]["usage"]["completion_tokens"])


async def test_an_interrupted_run_continues_where_it_stopped(
    setup: BulkSetup, database: str
) -> None:
    path = write_many(setup.folder / "in.jsonl", 90)
    async with running_worker(setup.redis_url, database):
        for count in (10, 40):
            with pytest.raises(Interrupted):
                await setup.run(path, window=20, on_progress=interrupt_after(count))
            assert count <= len(names(setup.paths.output)) < 90
        batch = await setup.run(path)
    assert (batch.state, batch.totals.completed) == (BatchState.COMPLETED, 90)
    assert batch.totals.output_tokens == sum(_tokens(line) for line in read(setup.paths.output))
    assert len(names(setup.paths.output)) == len(set(names(setup.paths.output))) == 90


async def test_lines_whose_results_only_the_database_has_are_not_generated_again(
    tmp_path: Path, redis_url: str, database: str
) -> None:
    import redis

    setup = BulkSetup(tmp_path, redis_url, database)
    path = write_many(tmp_path / "in.jsonl", 30)
    async with running_worker(redis_url, database):
        with pytest.raises(Interrupted):
            await setup.run(path, window=30, on_progress=interrupt_after(1))
        batch_id = (await asyncio.to_thread(setup.do, lambda _, store: store.newest()))[0].id
        await until(lambda: setup.do(_all_over(batch_id, 30)))
    with redis.Redis.from_url(redis_url) as server:
        server.flushall()
    batch = await setup.run(path)  # no worker is there: nothing can be generated
    assert (batch.state, batch.totals.completed) == (BatchState.COMPLETED, 30)


def _all_over(batch_id: str, count: int) -> Callable[[Client, BatchStore], bool]:
    return lambda _, store: len(list(store.results(batch_id))) == count


async def test_jobs_that_the_queue_lost_are_submitted_again(
    tmp_path: Path, redis_url: str, database: str
) -> None:
    import redis

    setup = BulkSetup(tmp_path, redis_url, None)
    path = write_many(tmp_path / "in.jsonl", 20)
    is_lost = threading.Event()

    def lose(progress: Any) -> None:
        if progress.in_flight and not is_lost.is_set():
            is_lost.set()
            with redis.Redis.from_url(redis_url) as server:
                for key in server.scan_iter("tm:{q}:job*"):
                    server.delete(key)

    task = asyncio.create_task(setup.run(path, on_progress=lose))
    await asyncio.to_thread(is_lost.wait, 60)
    async with running_worker(redis_url, database):
        batch = await task
    assert (batch.state, batch.totals.completed) == (BatchState.COMPLETED, 20)
    assert len(set(names(setup.paths.output))) == 20


async def test_a_cancelled_run_writes_an_error_for_every_open_line(
    setup: BulkSetup, database: str
) -> None:
    path = write_many(setup.folder / "in.jsonl", 60)
    seen = threading.Event()

    def cancel(progress: Any) -> None:
        if progress.totals.ended and not seen.is_set():
            seen.set()
            setup.do(lambda client, store: cancel_batch(client, store, store.newest()[0].id))

    async with running_worker(setup.redis_url, database):
        batch = await setup.run(path, window=10, on_progress=cancel)
    assert batch.state is BatchState.CANCELLED
    answered, rejected = names(setup.paths.output), read(setup.paths.errors)
    assert rejected
    assert sorted([*answered, *(line["custom_id"] for line in rejected)]) == sorted(
        f"line-{n}" for n in range(60)
    )
    assert {line["error"]["code"] for line in rejected} == {"batch_cancelled"}


async def test_a_run_without_a_worker_expires_at_its_completion_window(
    tmp_path: Path, redis_url: str
) -> None:
    setup = BulkSetup(tmp_path, redis_url, None)
    path = write_many(setup.folder / "in.jsonl", 30)
    batch = await setup.run(
        path, options=BatchOptions(completion_window="2s"), window=10, late_s=0.0
    )
    assert (batch.state, batch.totals.expired) == (BatchState.EXPIRED, 30)
    assert {line["error"]["code"] for line in read(setup.paths.errors)} == {"batch_expired"}


async def test_a_missing_worker_is_reported(tmp_path: Path, redis_url: str) -> None:
    class NoteSeenError(Exception):
        pass

    def on_progress(progress: Any) -> None:
        if progress.note:
            raise NoteSeenError(progress.note)

    setup = BulkSetup(tmp_path, redis_url, None)
    with pytest.raises(NoteSeenError, match="no worker serves this queue"):
        await setup.run(
            write_many(setup.folder / "in.jsonl", 30), window=10, on_progress=on_progress
        )


async def test_an_empty_file_fails(tmp_path: Path, redis_url: str, database: str) -> None:
    setup = BulkSetup(tmp_path, redis_url, database)
    batch = await setup.run(write(setup.folder / "in.jsonl", [""]))
    assert (batch.state, batch.errors[0].code) == (BatchState.FAILED, "empty_file")
    public = TheirBatch.model_validate_json(msgspec.json.encode(batch.public()), strict=True)
    assert public.failed_at


async def test_an_import_is_exported_from_another_folder(setup: BulkSetup, database: str) -> None:
    path = write(
        setup.folder / "in.jsonl", [*(numbered(number) for number in range(25)), "bad", numbered(3)]
    )
    async with running_worker(setup.redis_url, database):
        begun = await asyncio.to_thread(
            setup.do, lambda client, store: import_batch(client, store, path)
        )
        path.unlink()
        batch = await until(lambda: setup.do(_refreshed_to_the_end(begun.id)))
        assert (batch.state, batch.totals.completed, batch.totals.failed) == (
            BatchState.COMPLETED,
            25,
            2,
        )
        assert batch.totals.output_tokens > 0
        for _ in range(2):  # over what was there
            ended, missing = await asyncio.to_thread(setup.do, _exported(begun.id, setup.paths))
            assert (ended.state, missing) == (BatchState.COMPLETED, 0)
            assert sorted(names(setup.paths.output)) == sorted(
                f"line-{number}" for number in range(25)
            )
            assert [line["error"]["code"] for line in read(setup.paths.errors)] == [
                "invalid_json_line",
                "duplicate_custom_id",
            ]


def _refreshed_to_the_end(batch_id: str) -> Callable[[Client, BatchStore], Batch | None]:
    def look(client: Client, store: BatchStore) -> Batch | None:
        batch = refresh(client, store, batch_id)
        return batch if batch.state.is_final else None

    return look


def _exported(batch_id: str, paths: Paths) -> Callable[[Client, BatchStore], Any]:
    return lambda client, store: export_batch(client, store, batch_id, paths)


async def test_an_import_is_cancelled_while_its_jobs_wait(
    setup: BulkSetup, allowed_keys: list[str]
) -> None:
    allowed_keys.append("tm:{q}:*")  # no worker writes down what was cancelled
    path = write_many(setup.folder / "in.jsonl", 12)
    batch = await asyncio.to_thread(
        setup.do, lambda client, store: import_batch(client, store, path)
    )
    assert batch.state is BatchState.IN_PROGRESS
    ended = await asyncio.to_thread(
        setup.do, lambda client, store: cancel_batch(client, store, batch.id)
    )
    assert (ended.state, ended.totals.failed) == (BatchState.CANCELLED, 12)
    exported, missing = await asyncio.to_thread(setup.do, _exported(batch.id, setup.paths))
    assert (missing, exported.output_file, exported.error_file) == (
        0,
        None,
        str(setup.paths.errors.resolve()),
    )
    assert len(names(setup.paths.errors)) == 12
    assert not read(setup.paths.output)


async def test_answers_recorded_in_another_database_count_as_completed(
    tmp_path: Path, redis_url: str, database: str
) -> None:
    """A producer whose database is not the workers' finds answers in the queue alone.

    Its jobs did not fail.
    """
    (tmp_path / "other").mkdir()
    setup = BulkSetup(tmp_path, redis_url, database_url(tmp_path / "other"))
    path = write_many(tmp_path / "in.jsonl", 5)
    async with running_worker(redis_url, database):
        begun = await asyncio.to_thread(
            setup.do, lambda client, store: import_batch(client, store, path)
        )

        def over() -> Batch | None:
            found = setup.do(lambda client, store: refresh(client, store, begun.id))
            return found if found.state.is_final else None

        batch = await until(over)
    assert (batch.state, batch.totals.completed, batch.totals.failed) == (
        BatchState.COMPLETED,
        5,
        0,
    )
