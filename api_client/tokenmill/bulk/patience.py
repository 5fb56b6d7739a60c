"""Retries calls while the queue or the database is unreachable, and reports it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from tokenmill.errors import QueueUnavailable

T = TypeVar("T")

_PAUSES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Patience:
    """The time limit of such retries. `note` is the present error, "" if there is none; `tell` is
    called when it changes.
    """

    def __init__(self, limit_s: float, tell: Callable[[], object]) -> None:
        self._limit_s = limit_s
        self._tell = tell
        self.note = ""

    def ask(self, call: Callable[[], T]) -> T:
        """Return the value of a call, which may be repeated. Raises QueueUnavailable if the call
        has failed for too long.
        """
        since = time.monotonic()
        num_failures = 0
        while True:
            try:
                answer = call()
            except QueueUnavailable as trouble:
                if time.monotonic() - since > self._limit_s:
                    raise
                self._say(str(trouble))
                time.sleep(_PAUSES_S[min(num_failures, len(_PAUSES_S) - 1)])
                num_failures += 1
            else:
                self._say("")
                return answer

    def _say(self, note: str) -> None:
        if note != self.note:
            self.note = note
            self._tell()
