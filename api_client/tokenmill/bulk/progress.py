"""The limits of a run over a batch, the progress that it reports, and its retries."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from tokenmill.bulk.batch import Totals
from tokenmill.errors import QueueUnavailable
from tokenmill.transport.backoff import Backoff

T = TypeVar("T")

WINDOW: Final = 2_000
RETRY_FOR_S: Final = 600.0
_RETRY: Final = Backoff(first_s=0.1, longest_s=5.0)


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The progress of a run. `note` names what the run waits for, "" if nothing. `generated` counts
    the tokens since the run began.
    """

    total: int
    in_flight: int
    totals: Totals
    note: str = ""
    generated: int = 0


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The limits of a run.

    `window`: jobs in the queue at once. It has to be enough for the batches of all workers, and for
    the jobs that end between two polls. `late_s`: seconds after its deadline at which a job that no
    worker has ended is cancelled.
    """

    window: int = WINDOW
    retry_for_s: float = RETRY_FOR_S
    late_s: float = 10.0
    on_progress: Callable[[BatchProgress], object] = lambda _: None


class CallRetries:
    """Repeats calls while the queue or the database is unreachable, for `limit_s` at most.

    `note` is the present error, "" if there is none. `on_note` is called when it changes.
    """

    def __init__(self, limit_s: float, on_note: Callable[[], object]) -> None:
        self._limit_s = limit_s
        self._on_note = on_note
        self.note = ""

    def run(self, function: Callable[[], T]) -> T:
        """Return the value of a call, which may be repeated. Raises QueueUnavailable if the call
        has failed for too long.
        """
        since = time.monotonic()
        num_failures = 0
        while True:
            try:
                answer = function()
            except QueueUnavailable as trouble:
                if time.monotonic() - since > self._limit_s:
                    raise
                self._set_note(str(trouble))
                num_failures += 1
                time.sleep(_RETRY.delay_s(num_failures))
            else:
                self._set_note("")
                return answer

    def _set_note(self, note: str) -> None:
        if note != self.note:
            self.note = note
            self._on_note()
