"""Imports without a worker: resuming one submits no second window of its open jobs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.client.bulk.support import Interrupted, chat, write, write_many
from tokenmill import Client
from tokenmill.bulk import (
    Batch,
    BatchOptions,
    BatchProgress,
    BatchState,
    BatchStore,
    RunLimits,
    Totals,
    cancel_batch,
    feeder,
    import_batch,
    new_batch,
    open_store,
    pending_lines,
    refresh,
)
from tokenmill.bulk.formats.input_file import job_id
from tokenmill.errors import ConfigurationError

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]
WINDOW = 10


@pytest.fixture(autouse=True)
def no_worker_writes_down_what_was_cancelled(allowed_keys: list[str]) -> None:
    allowed_keys.append("tm:{q}:*")


@pytest.fixture(autouse=True)
def polls_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll every 20 ms instead of 200, and write the batch's record each time."""
    monkeypatch.setattr(feeder, "POLL_S", 0.02)
    monkeypatch.setattr(feeder, "SYNC_S", 0.02)


def stop_at_a_standstill() -> Callable[[BatchProgress], None]:
    """Interrupt the run when ten reports in a row have named the same open and ended jobs."""
    seen: list[BatchProgress] = []

    def on_progress(progress: BatchProgress) -> None:
        if seen and (progress.in_flight, progress.totals) != (seen[0].in_flight, seen[0].totals):
            seen.clear()
        seen.append(progress)
        if progress.in_flight and len(seen) >= 10:
            raise Interrupted

    return on_progress


def begin(client: Client, store: BatchStore, path: Path, **options: Any) -> Batch:
    with pytest.raises(Interrupted):
        import_batch(
            client,
            store,
            path,
            options=BatchOptions(**options),
            limits=RunLimits(WINDOW, on_progress=stop_at_a_standstill()),
        )
    return store.newest(1)[0]


def go_on(client: Client, store: BatchStore, path: Path, batch: Batch) -> Batch:
    with pytest.raises(Interrupted):
        import_batch(
            client,
            store,
            path,
            batch=batch,
            limits=RunLimits(WINDOW, on_progress=stop_at_a_standstill()),
        )
    return store.get(batch.id)


def test_the_window_bounds_all_runs_of_an_import_together(
    any_client: Client, store: BatchStore, tmp_path: Path
) -> None:
    path = write_many(tmp_path / "in.jsonl", 40)
    batch = begin(any_client, store, path)
    for _ in range(2):
        batch = go_on(any_client, store, path, batch)
        assert (any_client.depth().num_queued, batch.submitted, batch.over_line) == (
            WINDOW,
            WINDOW,
            0,
        )
    cancel_batch(any_client, store, batch.id)
    assert any_client.depth().num_queued == 0


def test_an_import_counts_each_line_once(
    any_client: Client, store: BatchStore, tmp_path: Path
) -> None:
    path = write(tmp_path / "in.jsonl", [chat(f"line-{number}") for number in range(30)])
    batch = begin(any_client, store, path)
    end(any_client, batch, range(4, WINDOW + 1))  # the first three are still open
    assert refresh(any_client, store, batch.id).state is BatchState.IN_PROGRESS
    batch = go_on(any_client, store, path, batch)
    assert batch.over_line == 0
    assert any_client.depth().num_queued <= WINDOW
    end(any_client, batch, range(1, 4))
    batch = go_on(any_client, store, path, batch)
    assert (batch.over_line, batch.submitted, batch.totals.failed) == (WINDOW, 2 * WINDOW, WINDOW)
    end(any_client, batch, range(WINDOW + 1, 2 * WINDOW + 1))
    import_batch(any_client, store, path, batch=batch, limits=RunLimits(WINDOW))
    batch = store.get(batch.id)
    assert (batch.over_line, batch.is_submitted, batch.totals.failed) == (
        2 * WINDOW,
        True,
        2 * WINDOW,
    )


def end(client: Client, batch: Batch, lines: range) -> None:
    for line in lines:
        client.cancel(job_id(batch.id, line))


def test_a_resumed_import_submits_no_second_job_for_waiting_lines(
    any_client: Client, store: BatchStore, tmp_path: Path
) -> None:
    path = write_many(tmp_path / "in.jsonl", WINDOW)
    with pytest.raises(Interrupted):  # they are in the queue, but that was not written down
        import_batch(
            any_client, store, path, limits=RunLimits(WINDOW, on_progress=_interrupt_when_full)
        )
    batch = import_batch(
        any_client, store, path, batch=store.newest(1)[0], limits=RunLimits(WINDOW)
    )
    assert (batch.is_submitted, batch.over_line) == (True, 0)
    end(any_client, batch, range(2, WINDOW + 1))
    assert refresh(any_client, store, batch.id).state is BatchState.IN_PROGRESS
    end(any_client, batch, range(1, 2))
    assert refresh(any_client, store, batch.id).state is BatchState.COMPLETED


def _interrupt_when_full(progress: Any) -> None:
    if progress.in_flight or progress.total:
        raise Interrupted


def test_an_import_past_its_window_rejects_only_lines_without_a_job(
    any_client: Client, store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_many(tmp_path / "in.jsonl", 25)
    batch = begin(any_client, store, path, completion_window="60s")
    monkeypatch.setattr(any_client.clock, "now_ms", lambda: batch.expires_ms)
    ended = import_batch(any_client, store, path, batch=batch)
    assert ended.state is BatchState.IN_PROGRESS  # of what waits in the queue
    assert [bad.line for bad in store.rejected(batch.id)] == list(range(WINDOW + 1, 26))
    end(any_client, batch, range(1, WINDOW + 1))
    assert refresh(any_client, store, batch.id).state is BatchState.EXPIRED


def test_a_file_that_shrinks_during_its_import_is_refused(
    any_client: Client, store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_lines, "PART_LINES", 100)  # a part is read before its jobs are
    path = write_many(tmp_path / "in.jsonl", 400)

    def cut(progress: Any) -> None:
        if progress.total:
            write_many(path, 3)

    with pytest.raises(ConfigurationError, match="has changed"):
        import_batch(any_client, store, path, limits=RunLimits(on_progress=cut))
    assert not store.newest(1)[0].is_submitted


@pytest.mark.parametrize(
    "line",
    [
        chat("a", model="m" * 300),
        chat("a", model="m\0"),
        chat("a") | {"url": "\0"},
        chat("a") | {"method": "P\0"},
        chat("a\0"),
        chat("a") | {"body": {"model": "m", "messages": [], "x\0": 1}},
        chat("a", messages=[{"role": "user", "content": [{"type": "a\0"}]}]),
        chat("a", response_format={"type": "a\0"}),
    ],
)
def test_a_line_cannot_delay_the_jobs_of_other_lines(
    any_client: Client, store: BatchStore, tmp_path: Path, line: dict[str, Any]
) -> None:
    path = write(tmp_path / "in.jsonl", [line, chat("b")])
    batch = import_batch(any_client, store, path, limits=RunLimits(retry_for_s=0.2))
    assert (batch.total, batch.totals.failed, any_client.depth().num_queued) == (2, 1, 1)
    (bad,) = store.rejected(batch.id)
    assert (bad.line, (bad.custom_id or "")[0]) == (1, "a")


@pytest.mark.parametrize("tenant", ["t" * 300, "t\0", "\ud800"])
def test_an_invalid_tenant_is_refused_before_the_import(
    client: Client, tmp_path: Path, tenant: str
) -> None:
    with pytest.raises(ConfigurationError, match="tenant"):
        new_batch(client, write_many(tmp_path / "in.jsonl", 1), BatchOptions(tenant=tenant))


def test_ended_lines_stay_counted_after_the_queue_deleted_them(
    client: Client, tmp_path: Path
) -> None:
    store = open_store(client, tmp_path / "out.jsonl")
    batch = import_batch(client, store, write_many(tmp_path / "in.jsonl", 5))
    seen = Totals(completed=3, output_tokens=12)
    store.progress(batch.id, submitted=5, over_line=3, totals=seen)
    assert refresh(client, store, batch.id).totals == seen
    cancelled = cancel_batch(client, store, batch.id)
    assert (cancelled.state, cancelled.totals.completed, cancelled.totals.failed) == (
        BatchState.CANCELLED,
        3,
        2,
    )
    store.close()


def test_a_run_with_open_lines_stays_in_progress(
    client: Client, redis_url: str, tmp_path: Path
) -> None:
    store = open_store(client, tmp_path / "out.jsonl")
    batch = import_batch(client, store, write_many(tmp_path / "in.jsonl", 5))
    store.progress(batch.id, submitted=5, over_line=3, totals=Totals(completed=3))
    with redis.Redis.from_url(redis_url) as server:
        server.delete(*server.scan_iter("tm:{q}:job:*"))
    found = refresh(client, store, batch.id)
    assert (found.state, found.totals.completed) == (BatchState.IN_PROGRESS, 3)
    store.close()


def test_lines_that_a_full_queue_never_took_expire(
    any_client: Client, store: BatchStore, tmp_path: Path
) -> None:
    path = write_many(tmp_path / "in.jsonl", 10)
    any_client.submit(prompt="x", priority="bulk")  # the limit is that of a priority
    any_client.set_queue_limit(1)
    batch = import_batch(any_client, store, path, options=BatchOptions(completion_window="1s"))
    assert (batch.state, batch.totals.expired, any_client.depth().num_queued) == (
        BatchState.EXPIRED,
        10,
        1,
    )


@pytest.mark.parametrize("limit", ["queue", "tenant"])
def test_a_queue_with_less_room_than_a_group_takes_smaller_groups(
    any_client: Client, store: BatchStore, tmp_path: Path, limit: str
) -> None:
    """A call is accepted as a whole or refused, so the groups become smaller."""
    if limit == "queue":
        any_client.set_queue_limit(20)
    else:
        any_client.set_limits("*", rate=0.001, burst=20)
        # a full bucket would let a larger group pass
        any_client.submit_many([{"prompt": "x"}] * 10)
    path = write_many(tmp_path / "in.jsonl", 60)
    with pytest.raises(Interrupted):
        import_batch(
            any_client,
            store,
            path,
            options=BatchOptions(),
            limits=RunLimits(1000, on_progress=stop_at_a_standstill()),
        )
    assert 10 <= any_client.depth().num_queued <= 20
