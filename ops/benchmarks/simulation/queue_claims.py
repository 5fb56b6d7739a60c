"""Simulates the worker's claims (worker/tokenmill_worker/consume/consumer.py) from a backlog that
never ends.

    room ─▶ claim of at most MAX_AT_ONCE ─▶ still room: the next one; else idle, until a step has
    made room

One call runs at a time. Each claim gets as many jobs as it asks for, so the worker always knows
that jobs wait: it never claims only to find out, it is never in the idle-worker set, and no submit
wakes it up. If no step makes room for a whole poll interval, it sends a claim for no jobs, as the
worker does to learn of jobs that ended while they waited.
"""

from collections.abc import Callable

from ops.benchmarks.simulation.queue_load import Observations
from ops.benchmarks.simulation.queue_server import QueueServer, ScriptCosts
from tokenmill_worker.consume.consumer import MAX_AT_ONCE, SHORTEST_GAP_S
from tokenmill_worker.settings import Settings

POLL_S = Settings.model_construct().poll_seconds


class Claims:
    """Claims of one worker.

    Args:
        credits: returns how many jobs could start soon.
        take: receives the number of claimed jobs.
    """

    def __init__(
        self,
        server: QueueServer,
        costs: ScriptCosts,
        seen: Observations,
        credits: Callable[[], int],
        take: Callable[[int], None],
    ) -> None:
        self._server, self._clock, self._costs, self._seen = server, server.clock, costs, seen
        self._credits, self._take = credits, take
        self._is_idle = True
        self._num_waits = 0

    def notice_room(self) -> None:
        if self._is_idle and self._credits() > 0:
            self._claim()

    def wait(self) -> None:
        """Claim as soon as there is room, or after the poll interval."""
        self._is_idle = True
        self._num_waits += 1
        number = self._num_waits

        def poll() -> None:
            if self._is_idle and self._num_waits == number:
                self._claim()

        self._clock.at(self._clock.now + POLL_S, poll)
        self.notice_room()

    def _claim(self) -> None:
        self._is_idle = False
        wanted, asked_at = min(self._credits(), MAX_AT_ONCE), self._clock.now

        def then(_effect: float) -> None:
            if not wanted:
                self._clock.at(self._clock.now + SHORTEST_GAP_S, self.wait)
                return
            if asked_at >= self._seen.since:
                self._seen.claims_s.append(self._clock.now - asked_at)
            self._take(wanted)
            self.wait()

        self._server.call("claim", self._costs.claim + wanted * self._costs.claimed, then)
