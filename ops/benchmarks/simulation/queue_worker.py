"""Simulates one worker with the product's loops: steps, appends, claims, finishes, heartbeats.

    place free ─▶ claim ─▶ joins the next step ─▶ a token per step ─▶ append ─▶ SQL ─▶ finish

Each loop has one call at a time, as the real one. The engine continues while appends wait, until
all claimed jobs have ended. A place becomes free when the end of its job is logged. The scripts
themselves are not simulated, only their cost.
"""

import random
from collections import defaultdict
from collections.abc import Callable

from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.queue_claims import Claims
from ops.benchmarks.simulation.queue_load import Cutting, Mix, Observations
from ops.benchmarks.simulation.queue_log import Log, Steps
from ops.benchmarks.simulation.queue_server import QueueServer, ScriptCosts
from ops.benchmarks.simulation.trace import MAX_ANSWER, answer_length
from tokenmill_worker.service import LOOKAHEAD
from tokenmill_worker.settings import Settings

_DEFAULTS = Settings.model_construct()
LEASE_S, HEARTBEAT_S = _DEFAULTS.lease_seconds, _DEFAULTS.heartbeat_interval
MAX_GROUP, MAX_BUFFERED = _DEFAULTS.record_group, _DEFAULTS.record_buffer
COMMIT_S = 0.004  # one SQL transaction, whatever its size


class Worker:
    def __init__(
        self,
        server: QueueServer,
        costs: ScriptCosts,
        device: CostModel,
        mix: Mix,
        cutting: Cutting,
        seen: Observations,
        source: random.Random,
        on_finished: Callable[[int], None],
    ) -> None:
        self._server, self._clock, self._costs, self._device = server, server.clock, costs, device
        self._mix, self._cutting, self._seen, self._source = mix, cutting, seen, source
        self._step = 0
        self._running = 0
        self._joining = 0
        self._phases = (
            [0] * cutting.tokens
        )  # number of sequences, by the step (modulo tokens) at which their chunk is full
        self._openings: dict[int, int] = defaultdict(int)  # step → jobs whose first chunk is full
        self._ends: dict[int, list[int]] = defaultdict(
            list
        )  # step → lengths of the answers that end there
        self._is_stepping = False
        self._in_hand = 0  # claimed jobs whose end is not logged
        self._records = Records(server, costs, seen, on_finished)
        self._claims = Claims(server, costs, seen, self._credits, self._take)
        self._log = Log(
            server,
            costs,
            seen,
            cutting,
            mix.num_sequences,
            on_ended=self._ended,
            on_room=self._claims.notice_room,
        )

    def start(self, delay: float) -> None:
        """Start with every place taken and each answer partly generated."""
        self._in_hand = self._mix.num_sequences
        for _ in range(self._in_hand):
            self._admit(self._source.randint(1, self._running_length()))
        self._clock.at(delay, self._begin_step)
        self._clock.at(delay, self._claims.wait)
        self._clock.at(delay + self._source.random() * HEARTBEAT_S, self._beat)

    def _running_length(self) -> int:
        """Draw the length of an answer that runs at a random time, which favours long ones."""
        while True:
            length = answer_length(self._source)
            if self._source.random() < length / MAX_ANSWER:
                return length

    # ── engine ──

    def _admit(self, length: int) -> None:
        cutting, opening = self._cutting, self._step + self._cutting.first - 1
        self._running += 1
        self._phases[opening % cutting.tokens] += 1
        self._ends[self._step + length - 1].append(length)
        if length >= cutting.first:
            self._openings[opening] += 1

    def _begin_step(self) -> None:
        joined = min(self._joining, self._mix.num_sequences - self._running)
        self._joining -= joined
        for _ in range(joined):
            self._admit(answer_length(self._source))
        self._is_stepping = self._running > 0
        if self._is_stepping:
            read = self._running * self._mix.context
            new = joined * self._mix.prompt_tokens
            seconds = self._device.seconds(
                self._running + new, read + new, read + new * self._mix.prompt_tokens // 2
            )
            self._clock.at(self._clock.now + seconds, self._end_step)

    def _end_step(self) -> None:
        made = self._made()
        self._running -= made.ended
        self._step += 1
        if made.chunks or made.ended:
            self._log.add(made)
        self._begin_step()

    def _made(self) -> Steps:
        """Return the step's output; an unpublished answer's last tokens are only in its result."""
        cutting, ended = self._cutting, self._ends.pop(self._step, [])
        rests = [rest for length in ended if (rest := (length - cutting.first) % cutting.tokens)]
        full, opened = self._phases[self._step % cutting.tokens], self._openings.pop(self._step, 0)
        for length in ended:
            self._phases[(self._step - length + cutting.first) % cutting.tokens] -= 1
        return Steps(
            ats=(self._clock.now,),
            jobs=self._running,
            events=self._running,
            tokens=(full - opened) * cutting.tokens + opened * cutting.first + sum(rests),
            chunks=full + (len(rests) if cutting.is_published else 0),
            opened=opened,
            ended=len(ended),
        )

    # ── jobs ──

    def _credits(self) -> int:
        """Return credits as Service.credits would, for an engine that admits jobs at once."""
        return (
            0
            if self._records.is_full
            else max(0, self._mix.num_sequences + LOOKAHEAD - self._in_hand)
        )

    def _take(self, count: int) -> None:
        self._in_hand += count
        self._joining += count
        if not self._is_stepping:
            self._begin_step()

    def _ended(self, count: int) -> None:
        self._in_hand -= count
        self._records.add(count)

    # ── lease ──

    def _beat(self) -> None:
        sent_at, held = self._clock.now, self._in_hand + len(self._records)

        def then(_effect: float) -> None:
            if sent_at >= self._seen.since:
                self._seen.beats_s.append(self._clock.now - sent_at)
            self._clock.at(self._clock.now + HEARTBEAT_S, self._beat)

        self._server.call("heartbeat", self._costs.heartbeat + held * self._costs.held, then)


class Records:
    """Commits ended jobs to SQL in groups, then finishes them by script.

    Each stage has one group at a time.
    """

    def __init__(
        self,
        server: QueueServer,
        costs: ScriptCosts,
        seen: Observations,
        on_finished: Callable[[int], None],
    ) -> None:
        self._server, self._clock, self._costs, self._seen = server, server.clock, costs, seen
        self._on_finished = on_finished
        self._to_record = self._to_finish = 0
        self._recording = self._finishing = 0

    def __len__(self) -> int:
        return self._to_record + self._recording + self._to_finish + self._finishing

    @property
    def is_full(self) -> bool:
        return len(self) >= MAX_BUFFERED

    def add(self, count: int) -> None:
        self._to_record += count
        self._record()

    def _record(self) -> None:
        if self._recording or not self._to_record:
            return
        self._recording = min(self._to_record, MAX_GROUP)
        self._to_record -= self._recording

        def then() -> None:
            self._to_finish += self._recording
            self._recording = 0
            self._finish()
            self._record()

        self._clock.at(self._clock.now + COMMIT_S, then)

    def _finish(self) -> None:
        if self._finishing or not self._to_finish:
            return
        group = self._finishing = min(self._to_finish, MAX_GROUP)
        self._to_finish -= group

        def then(effect: float) -> None:
            self._finishing = 0
            if effect >= self._seen.since:
                self._seen.jobs += group
            self._on_finished(group)
            self._finish()

        self._server.call("finish", self._costs.finish + group * self._costs.finished, then)
