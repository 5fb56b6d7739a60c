"""The limits of one wait for a job: its timeout, the time a server may be away, and the time in a
queue that no worker has ever served.
"""

from __future__ import annotations

import math
import time

from tokenmill.errors import QueueUnavailable, QueueUnserved, ResultTimeout, TokenmillError
from tokenmill.operations.io_requests import Commands, Operation, QueueContext, server_time
from tokenmill.operations.records import JobInfo
from tokenmill.transport.backoff import Backoff
from tokenmill_schemas.result import JobStatus

RECONNECT = Backoff(first_s=0.05, longest_s=2.0)
LOOK_ANYWAY_S = 120.0  # a silent job that looks unchanged is read again after so long


def is_served(context: QueueContext) -> Operation[bool]:
    """Return whether a worker has ever served this queue; submit.lua decides it in the same way."""
    finished = [f"finished:{state.value}" for state in JobStatus if state.is_final]
    marks, workers = yield Commands(
        (("HMGET", context.keys.meta, "served", *finished), ("SMEMBERS", context.keys.workers))
    )
    return bool(workers) or any(mark is not None for mark in marks)


_WAITING = (JobStatus.SCHEDULED, JobStatus.QUEUED)


class RetryWindow:
    """The time limits of one wait, and what was observed during it."""

    def __init__(self, context: QueueContext, job_id: str, timeout: float | None) -> None:
        self._context, self._options = context, context.options
        self._job_id = job_id
        self._timeout = timeout
        self._since = time.monotonic()
        self._failures = 0
        self._trouble_since: float | None = None
        self._unserved_at = (
            math.inf
            if context.options.unserved_s is None
            else self._since + context.options.unserved_s
        )
        self.was_connected = False
        self.was_known = False

    def next_wait_s(self) -> float:
        """Return the longest time in seconds for the next wait. Raises ResultTimeout."""
        now = time.monotonic()
        until_asked = self._unserved_at - now
        longest = (
            min(self._options.idle_s, until_asked) if until_asked > 0 else self._options.idle_s
        )
        if self._timeout is None:
            return longest
        left = self._since + self._timeout - now
        if left <= 0:
            raise ResultTimeout(self._job_id, self._timeout)
        return min(longest, left)

    def limit_s(self) -> float:
        """Return the time in seconds until a limit of this wait may pass."""
        now = time.monotonic()
        limits = [LOOK_ANYWAY_S]
        if self._unserved_at > now:
            limits.append(self._unserved_at - now)
        if self._timeout is not None:
            limits.append(self._since + self._timeout - now)
        return min(limits)

    def check_served(self, info: JobInfo) -> Operation[None]:
        """Raise QueueUnserved if the job has waited long enough and no worker has ever served the
        queue. Ask the server once.
        """
        if info.status not in _WAITING or time.monotonic() < self._unserved_at:
            return
        if info.not_before_ms > (yield from server_time()):
            return
        if not (yield from is_served(self._context)):
            raise QueueUnserved(self._context.keys.queue, self._job_id)
        self._unserved_at = math.inf

    def progress(self) -> None:
        """Restart the timeout after a chunk was delivered and its consumer came back, so that the
        consumer's own time does not count.
        """
        if self._timeout is not None:
            self._since = time.monotonic()

    def succeeded(self) -> None:
        """Note that the server answered: the next failure is the first again."""
        self.was_connected, self._failures, self._trouble_since = True, 0, None

    def pause_s(self, trouble: TokenmillError) -> float:
        """Return the pause in seconds before the next attempt. Raise the error instead if it has
        lasted too long, or if there was no success before it.
        """
        now = time.monotonic()
        self._trouble_since = self._trouble_since or now
        seen_before = (
            self.was_connected if isinstance(trouble, QueueUnavailable) else self.was_known
        )
        if not seen_before or now - self._trouble_since > self._options.retry_for_s:
            raise trouble
        if not self._failures and self._options.on_trouble is not None:
            self._options.on_trouble(trouble)
        self._failures += 1
        return min(RECONNECT.delay_s(self._failures), self.next_wait_s())
