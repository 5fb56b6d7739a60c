"""Tests of the rows that one call of the store leaves in the database."""

import asyncio
import dataclasses
import json
import threading
from typing import Any

import msgspec
import pytest

from tests.record.support import counts, failed, finished, result, rows
from tokenmill_schemas import ChoiceResult, JobStatus, Usage
from tokenmill_schemas.codec import decode_result
from tokenmill_worker.record import ResultStore
from tokenmill_worker.record.rows import JobRecord


async def test_a_finished_job_is_one_row_in_each_table(store: ResultStore, url: str) -> None:
    job = finished("a")
    report = await store.record([job])
    assert report.written == {"a"}
    row = rows(url, "SELECT * FROM jobs")[0]
    assert decode_result(bytes(row["result"])) == job.result
    assert (row["text"], row["state"], row["finish_reason"]) == (
        "Blue light scatters. ☁",
        "succeeded",
        "stop",
    )
    assert (row["queue"], row["tenant"], row["model"], row["priority"]) == (
        "q",
        "acme",
        "tiny",
        "interactive",
    )
    assert (row["prompt_kind"], row["batch_id"], row["worker_id"], row["attempts"]) == (
        "text",
        "batch-1",
        "w1",
        1,
    )
    read = {
        name: json.loads(row[name]) if isinstance(row[name], str) else row[name]
        for name in ("token_ids", "params", "logprobs")
    }
    assert read == {
        "token_ids": [7, 8, 9],
        "params": {"max_tokens": 64, "logit_bias": {"5": 1.5}},
        "logprobs": [[-0.25, [[7, -0.25], [3, -1.5]]], [-1.0, []], [-2.0, []]],
    }
    used = rows(url, "SELECT * FROM usage")[0]
    assert (used["prompt_tokens"], used["cached_tokens"], used["completion_tokens"]) == (11, 4, 3)
    assert (used["queue_ms"], used["ttft_ms"], used["total_ms"], used["day"]) == (
        5,
        20,
        90,
        "2026-11-18",
    )


async def test_prompts_are_recorded_only_with_the_setting(url: str) -> None:
    quiet, open_ = ResultStore(url, queue="q"), ResultStore(url, queue="q", with_prompts=True)
    await quiet.record([finished("quiet")])
    await open_.record([finished("open")])
    prompts = {row["id"]: row["prompt"] for row in rows(url, "SELECT id, prompt FROM jobs")}
    assert prompts["quiet"] is None
    assert "a secret prompt" in prompts["open"]
    assert "secret" not in str(rows(url, "SELECT * FROM jobs WHERE id = 'quiet'"))
    await quiet.close()
    await open_.close()


async def test_the_envelope_and_the_predecessor_of_a_job_are_recorded_as_they_came(
    store: ResultStore, url: str
) -> None:
    envelope = b'{"input": "a\\u0000b"}\x00\xff'
    one = finished("b")
    assert one.request is not None
    request = msgspec.structs.replace(one.request, envelope=envelope, previous_id="a")
    await store.record([finished("a"), dataclasses.replace(one, request=request)])
    kept = rows(url, "SELECT id, envelope, previous_id FROM jobs ORDER BY id")
    assert [(row["envelope"], row["previous_id"]) for row in kept] == [
        (None, None),
        (envelope, "a"),
    ]


async def test_a_second_delivery_changes_no_row_and_gets_the_recorded_result(
    store: ResultStore, url: str
) -> None:
    first = finished("a")
    await store.record([first])
    again = finished(
        "a",
        token=2,
        choices=(ChoiceResult(text="another answer"),),
        usage=Usage(completion_tokens=99),
    )
    report = await store.record([again, finished("b")])
    assert report.written == {"b"}
    assert report.existing == {"a": first.result}
    assert counts(url) == (2, 2, 2, 2)
    assert rows(url, "SELECT sum(completion_tokens) AS n FROM usage")[0]["n"] == 6


async def test_the_same_job_twice_in_one_group_is_recorded_once_under_its_newest_token(
    store: ResultStore, url: str
) -> None:
    old, new = finished("a", token=1), finished("a", token=2, worker_id="w2")
    report = await store.record([new, old])
    assert report.written == {"a"}
    assert rows(url, "SELECT worker_id FROM jobs") == [{"worker_id": "w2"}]


async def test_concurrent_writers_record_each_job_once(url: str) -> None:
    stores = [ResultStore(url, queue="q") for _ in range(4)]
    ids = [f"job-{number:03d}" for number in range(60)]
    # each in another order: rows must be locked in one order all the same, or writers deadlock
    orders = [ids, ids[::-1], ids[30:] + ids[:30], ids[::2] + ids[1::2]]
    groups = [
        [finished(job_id, worker_id=f"w{number}") for job_id in order]
        for number, order in enumerate(orders)
    ]
    reports = await asyncio.gather(
        *(store.record(group) for store, group in zip(stores, groups, strict=True))
    )
    assert sum(len(report.written) for report in reports) == 60
    assert all(len(report.written) + len(report.existing) == 60 for report in reports)
    assert counts(url) == (60, 60, 60, 60)
    reported = {
        job_id: end.worker_id for report in reports for job_id, end in report.existing.items()
    }
    assert reported == {
        row["id"]: row["worker_id"] for row in rows(url, "SELECT id, worker_id FROM jobs")
    }
    for store in stores:
        await store.close()


async def test_a_dead_row_is_replaced_by_the_redriven_job_s_result(
    store: ResultStore, url: str
) -> None:
    await store.record([failed("a", status=JobStatus.DEAD, finished_ms=1000)])
    redriven = finished("a", token=5, finished_ms=900)  # on a machine whose clock is behind
    assert (await store.record([redriven])).written == {"a"}
    late = failed("a", status=JobStatus.DEAD, finished_ms=2000)  # a frozen worker wakes up
    assert (await store.record([late])).existing == {"a": redriven.result}
    assert rows(url, "SELECT state, error_code FROM jobs") == [
        {"state": "succeeded", "error_code": None}
    ]
    assert rows(url, "SELECT state, completion_tokens AS n FROM usage") == [
        {"state": "succeeded", "n": 3}
    ]


async def test_a_job_that_dies_again_has_the_row_of_its_last_death(
    store: ResultStore, url: str
) -> None:
    await store.record(
        [failed("a", "first", status=JobStatus.DEAD, started_ms=1000, finished_ms=1500)]
    )
    await store.record(
        [failed("a", "second", status=JobStatus.DEAD, started_ms=2000, finished_ms=2500)]
    )
    await store.record(
        [failed("a", "first", status=JobStatus.DEAD, started_ms=1000, finished_ms=3500)]
    )
    assert rows(url, "SELECT error_message AS m FROM jobs") == [{"m": "second"}]
    assert counts(url) == (1, 1, 1, 1)


async def test_an_id_of_another_tenant_is_neither_overwritten_nor_shown(
    store: ResultStore, url: str
) -> None:
    await store.record([failed("a", status=JobStatus.DEAD)])
    report = await store.record([finished("a", tenant="mallory")])
    assert report.taken == {"a"}
    assert not report.existing
    assert not report.written
    assert rows(url, "SELECT tenant FROM jobs") == [{"tenant": "acme"}]


@pytest.mark.parametrize("status", [s for s in JobStatus if s.is_final])
async def test_every_end_is_recorded_and_billed_once(
    store: ResultStore, url: str, status: JobStatus
) -> None:
    await store.record([finished("a", status=status)])
    assert rows(url, "SELECT state FROM usage") == [{"state": status.value}]
    assert counts(url) == (1, 1, 1, 1)


async def test_an_undecodable_job_is_recorded_without_a_request(
    store: ResultStore, url: str
) -> None:
    job = failed("a")
    blind = type(job)(job.token, job.result, job.final_chunk, None)
    await store.record([blind])
    assert rows(url, "SELECT prompt_kind, params, error_message AS m FROM jobs") == [
        {"prompt_kind": None, "params": None, "m": "too long"}
    ]


async def test_thousands_of_jobs_fit_in_one_call(store: ResultStore, url: str) -> None:
    report = await store.record([finished(f"job-{number}") for number in range(2500)])
    assert len(report.written) == 2500
    assert counts(url) == (2500, 2500, 2500, 2500)


async def test_an_empty_group_needs_no_database() -> None:
    store = ResultStore("postgresql://nobody@127.0.0.1:1/none", queue="q")
    assert (await store.record([])).written == set()


def test_results_made_by_the_test_helper_differ_by_id() -> None:
    assert result().job_id != result().job_id


async def test_only_final_results_of_this_queue_are_found(store: ResultStore, url: str) -> None:
    """The dead may be redriven: their row is not the last word."""
    await store.record([finished("a"), failed("dead", status=JobStatus.DEAD)])
    other = ResultStore(url, queue="another")
    await other.record([finished("elsewhere")])
    found = await store.find(["a", "dead", "elsewhere", "never"])
    await other.close()
    assert found == {"a": finished("a").result}


async def test_rows_are_encoded_outside_the_event_loop(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large result takes tens of milliseconds to encode."""
    threads, make = [], JobRecord.of

    def of(*arguments: Any, **options: Any) -> JobRecord:
        threads.append(threading.current_thread())
        return make(*arguments, **options)

    monkeypatch.setattr(JobRecord, "of", of)
    await store.record([finished("a")])
    assert threads
    assert threading.current_thread() not in threads


async def test_thoughts_are_stored_in_their_own_columns(url: str) -> None:
    choice = ChoiceResult(text="Yes", token_ids=(1, 2), reasoning="Hm", reasoning_ends=(2,))
    usage = Usage(completion_tokens=2, reasoning_tokens=1)
    await ResultStore(url, queue="q").record([finished("one", choices=(choice,), usage=usage)])
    (row,) = rows(url, "SELECT text, reasoning FROM jobs")
    assert (row["text"], row["reasoning"]) == ("Yes", "Hm")
    assert rows(url, "SELECT reasoning_tokens FROM usage")[0]["reasoning_tokens"] == 1
