"""Models one job as its user sees it; the model of the scripts is made of these."""

from __future__ import annotations

import dataclasses

from tokenmill_schemas.result import JobStatus
from tokenmill_worker.jobs import AppendReply


@dataclasses.dataclass
class Job:
    state: JobStatus = JobStatus.QUEUED
    holder: str | None = None
    token: int = 0
    length: int = 0
    cancelled: bool = False
    settled: bool = False
    claims: int = 0
    tenant: str = ""
    ends: frozenset[int] = frozenset()  # entries of its log that are no tokens
    due: bool = False  # scheduled, and its time has come
    attempt: int = 1
    returned: bool = False  # it ran, and waits ahead of the streams for its next worker

    def append(self, token: int, worker: str, index: int, end: int) -> tuple[AppendReply, int]:
        """Return the reply that the server must give to an append of the next token.

        `end` is the server's own second value; it is free when the worker has lost the job.
        """
        if (self.token, self.holder, self.state) != (token, worker, JobStatus.RUNNING):
            return AppendReply.LOST, end
        if index != self.length:
            return AppendReply.DUPLICATE if index < self.length else AppendReply.GAP, self.length
        self.length += 1
        return AppendReply.CANCELLED if self.cancelled else AppendReply.OK, self.length

    def give_up(self) -> None:
        self.holder = None
        if self.state is JobStatus.RUNNING:
            self.state, self.returned = JobStatus.QUEUED, True
