"""Reads and changes many jobs of a queue, in pages: one round trip for a few hundred jobs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tokenmill.bulk.pages import paged
from tokenmill.client import Client
from tokenmill.errors import UnreadableRecord
from tokenmill.operations.io_requests import Commands, RunScript, ask
from tokenmill.operations.jobs import ask_each, ask_records
from tokenmill.operations.records import Record, is_wrong_type, read_record
from tokenmill.operations.submit import submit
from tokenmill.operations.tracing import producing
from tokenmill.transport.scripts import CANCEL, COLLECT
from tokenmill_schemas.codec import DecodeError, decode_request, decode_result
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult, JobStatus

log = logging.getLogger(__name__)

COLLECTED_TTL_S: Final = 60  # how long Redis keeps a job after its result was written to a file
MAX_COLLECTED_BYTES: Final = 16 * 1024 * 1024
_OVER: Final = frozenset(status.value.encode() for status in JobStatus if status.is_final)


@dataclass(slots=True)
class Ends:
    """The ended jobs of one call: `results` of ended jobs, `unknown` ids that the queue does not
    have, and `unreadable` ids whose record is damaged or of a newer version.
    """

    results: list[JobResult] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def submit_jobs(client: Client, jobs: Sequence[JobRequest]) -> None:
    """Submit requests that were validated when they were built."""
    with producing(client.queue, jobs) as requests:
        client.perform(submit(client.context, requests))


def collect(
    client: Client,
    job_ids: Sequence[str],
    in_files: Sequence[str] = (),
    *,
    max_bytes: int = MAX_COLLECTED_BYTES,
) -> Ends:
    """Return the ended jobs of a page, with their results, in one call. Redis drops the jobs
    `in_files` after COLLECTED_TTL_S seconds.
    """
    limits = (COLLECTED_TTL_S, len(in_files), max_bytes)
    replies = client.perform(ask(RunScript(COLLECT, (*limits, *in_files, *job_ids))))
    ends, unrecorded = Ends(), []
    for job_id, word in zip(job_ids, replies, strict=True):
        if word is None:
            ends.unknown.append(job_id)
        elif word == _UNRECORDED:
            unrecorded.append(job_id)
        elif word:
            try:
                ends.results.append(decode_result(word))
            except DecodeError:
                ends.unreadable.append(job_id)
    if unrecorded:
        ends.results += results(client, unrecorded)
    return ends


# replies of collect.lua; no result is one byte long. "!": the job's key is no hash
_UNRECORDED: Final = b"?"  # over, but not recorded


def is_over(client: Client, job_ids: Sequence[str]) -> dict[str, bool]:
    """Return, for each job that the queue has, whether it is over. A job whose key is no hash never
    runs and counts as over.
    """
    found: dict[str, bool] = {}
    for page in paged(job_ids):
        replies = client.perform(
            ask_each([("HGET", client.keys.job(job_id), "state") for job_id in page])
        )
        for name, state in zip(page, replies, strict=True):
            if state is not None:
                found[name] = is_wrong_type(state) or state in _OVER
    return found


def results(client: Client, job_ids: Sequence[str]) -> Iterator[JobResult]:
    """Yield the results of jobs that are over and in the queue.

    A job that ended without a worker gets the metadata of its request. A job whose record cannot be
    read is left out, with a warning.
    """
    for page in paged(job_ids):
        over = [record for record in _records(client, page) if record.is_over]
        yield from (record.result for record in over if record.result is not None)
        yield from _unrecorded(client, [record for record in over if record.result is None])


def _records(client: Client, page: Sequence[str]) -> Iterator[Record]:
    for job_id, values, last in client.perform(ask_records(client.context, page)):
        try:
            record = read_record(job_id, values, last)
        except UnreadableRecord as error:
            log.warning("Left one result of a batch out of the answers: %s", error)
        else:
            if record is not None:
                yield record


def _unrecorded(client: Client, records: Sequence[Record]) -> Iterator[JobResult]:
    if not records:
        return
    keys = [client.keys.job(record.info.job_id) for record in records]
    requests = client.perform(ask(Commands(tuple(("HGET", key, "request") for key in keys))))
    for record, packed in zip(records, requests, strict=True):
        outcome = record.outcome()
        try:
            metadata = decode_request(packed).metadata if packed is not None else {}
        except DecodeError:
            metadata = {}
        yield msgspec.structs.replace(outcome, metadata=metadata)


def cancel(client: Client, job_ids: Sequence[str]) -> None:
    """Cancel all of these jobs that are not over."""
    for page in paged(job_ids):
        client.perform(ask(RunScript(CANCEL, tuple(page))))
