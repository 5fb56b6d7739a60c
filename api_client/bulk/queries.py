"""What bulk work asks of the queue about its jobs, in pages: one round trip for some hundred of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from api_client.client import Client
from api_client.effects import Commands, Program, RunScript
from api_client.programs import read, submit
from api_client.records import Record, readable
from api_client.scripts import CANCEL, COLLECT, Argument
from api_client.tracing import producing
from schemas.codec import DecodeError, decode_request, decode_result
from schemas.job import JobRequest
from schemas.result import JobResult, JobStatus

PAGE: Final = 500
COLLECTED_TTL_S: Final = 60  # how long Redis keeps a result that lies in a file
MAX_COLLECTED_BYTES: Final = 16 * 1024 * 1024
_OVER: Final = frozenset(status.value.encode() for status in JobStatus if status.is_final)


def ask(commands: Sequence[tuple[Argument, ...]]) -> Program[Sequence[Any]]:
    """Any commands, in one round trip."""
    replies: Sequence[Any] = yield Commands(tuple(commands))
    return replies


@dataclass(slots=True)
class Ends:
    """Of the jobs that were asked about: those that are over, and those that the queue does not know."""

    results: list[JobResult] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def hand_in(client: Client, jobs: Sequence[JobRequest]) -> None:
    """`submit_many` for requests that were checked when they were made."""
    with producing(client.queue, jobs) as requests:
        client.perform(submit(client.view, requests))


def collect(
    client: Client, job_ids: Sequence[str], in_files: Sequence[str] = (), *, max_bytes: int = MAX_COLLECTED_BYTES
) -> Ends:
    """One call for a page: its ends with their results. Those `in_files` need not stay in the queue's memory."""
    replies = client.perform(_collect(job_ids, in_files, max_bytes))
    ends, unrecorded = Ends(), []
    for job_id, word in zip(job_ids, replies, strict=True):
        if word is None:
            ends.unknown.append(job_id)
        elif word == _UNRECORDED:
            unrecorded.append(job_id)
        elif word:
            with readable(f"the record of job {job_id}"):
                ends.results.append(decode_result(word))
    if unrecorded:
        ends.results += results(client, unrecorded)
    return ends


_UNRECORDED: Final = b"?"  # no result is one byte long


def _collect(job_ids: Sequence[str], in_files: Sequence[str], max_bytes: int) -> Program[Sequence[bytes | None]]:
    limits = (COLLECTED_TTL_S, len(in_files), max_bytes)
    replies: Sequence[bytes | None] = yield RunScript(COLLECT, (*limits, *in_files, *job_ids))
    return replies


def standing(client: Client, job_ids: Sequence[str]) -> dict[str, bool]:
    """Job id → is it over? Those that the queue does not know are left out."""
    found: dict[str, bool] = {}
    for page in _pages(job_ids):
        replies = client.perform(ask([("HGET", client.keys.job(job_id), "state") for job_id in page]))
        found |= {name: state in _OVER for name, state in zip(page, replies, strict=True) if state is not None}
    return found


def results(client: Client, job_ids: Sequence[str]) -> Iterator[JobResult]:
    """Of those that are over and known to the queue. One that ended without a worker has its request's metadata."""
    for page in _pages(job_ids):
        records = [record for record in client.perform(read(client.view, page)) if record is not None]
        over = [record for record in records if record.is_over]
        yield from (record.result for record in over if record.result is not None)
        yield from _unrecorded(client, [record for record in over if record.result is None])


def _unrecorded(client: Client, records: Sequence[Record]) -> Iterator[JobResult]:
    if not records:
        return
    keys = [client.keys.job(record.info.job_id) for record in records]
    requests = client.perform(ask([("HGET", key, "request") for key in keys]))
    for record, packed in zip(records, requests, strict=True):
        outcome = record.outcome()
        try:
            metadata = decode_request(packed).metadata if packed is not None else {}
        except DecodeError:
            metadata = {}
        yield msgspec.structs.replace(outcome, metadata=metadata)


def cancel(client: Client, job_ids: Sequence[str]) -> None:
    """All that are not over."""
    for page in _pages(job_ids):
        client.perform(_cancel(page))


def _cancel(job_ids: Sequence[str]) -> Program[None]:
    yield RunScript(CANCEL, tuple(job_ids))


def _pages(job_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(job_ids), PAGE):
        yield job_ids[start : start + PAGE]
