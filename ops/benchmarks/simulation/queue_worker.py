"""One worker in virtual time, with the product's loops: engine steps, appends, claims, finishes, heartbeats.

    place free ─▶ claim ─▶ joins the next step ─▶ a token per step ─▶ append (one under way) ─▶ SQL ─▶ finish

Each loop has one call under way, as the real one; the engine goes on while appends wait, and claims stop when too
many tokens do. It knows no scripts, only what they cost. Claims are as they once were: for every free place, and again
after one that got all it asked for.
"""

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.queue_server import Clock, QueueServer, ScriptCosts
from ops.benchmarks.simulation.trace import MAX_ANSWER, answer_length
from worker.publish.chunker import MOST_TOGETHER

LEASE_S, HEARTBEAT_S = 10.0, 10.0 / 3
COMMIT_S = 0.004  # one SQL transaction, whatever is in it
CLAIM_GAP_S = 0.005  # after a claim that found less than it wanted: consumer.SHORTEST_GAP_S
MAX_UNLOGGED, MAX_APPENDS = 50_000, 2_048  # tokens, chunks: publisher.PublishLimits
LOOKAHEAD = 4  # jobs claimed before there is a place for them: service.LOOKAHEAD


@dataclass(frozen=True, slots=True)
class Cutting:
    """How answers become chunks; those of bulk are logged and not published."""

    name: str
    tokens: int
    is_published: bool = True


@dataclass(frozen=True, slots=True)
class Mix:
    """What the jobs are like. A sequence reads `context` tokens of keys and values per step on average."""

    name: str
    prompt_tokens: int
    context: int
    num_sequences: int = 256


@dataclass(slots=True)
class Observations:
    """Of all workers, from `since` on; seconds. Tokens count when they are logged."""

    since: float
    tokens: int = 0
    jobs: int = 0
    claims_s: list[float] = field(default_factory=list)
    added_s: list[float] = field(default_factory=list)
    beats_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Frame:
    """What one engine step made: chunks to append, jobs at their end."""

    at: float
    chunks: int
    tokens: int
    ended: int


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
        self._server, self._costs, self._device = server, costs, device
        self._clock: Clock = server.clock
        self._mix, self._cutting, self._seen, self._source = mix, cutting, seen, source
        self._on_finished = on_finished
        self._step = 0
        self._running = 0
        self._joining = 0
        self._phases = [0] * cutting.tokens  # sequences by the step at which their chunk is full
        self._ends: dict[int, list[int]] = defaultdict(list)  # step → lengths of the answers that end there
        self._frames: deque[_Frame] = deque()
        self._unlogged = 0
        self._is_appending = self._is_claiming = self._is_stepping = False
        self._to_record = 0
        self._is_recording = False

    def start(self, delay: float) -> None:
        """In mid-service: every place taken, each answer somewhere on its way."""
        for _ in range(self._mix.num_sequences):
            self._admit(self._source.randint(1, self._running_length()))
        self._clock.at(delay, self._begin_step)
        self._clock.at(delay + self._source.random() * HEARTBEAT_S, self._beat)

    def _running_length(self) -> int:
        """Of those that run at a moment the long ones are many."""
        while True:
            length = answer_length(self._source)
            if self._source.random() < length / MAX_ANSWER:
                return length

    # ── engine ──

    def _admit(self, length: int) -> None:
        self._running += 1
        self._phases[(self._step - 1) % self._cutting.tokens] += 1
        self._ends[self._step + length - 1].append(length)

    def _begin_step(self) -> None:
        joined = min(self._joining, self._mix.num_sequences - self._running)
        self._joining -= joined
        for _ in range(joined):
            self._admit(answer_length(self._source))
        self._is_stepping = self._running > 0
        if self._is_stepping:
            read = self._running * self._mix.context
            new = joined * self._mix.prompt_tokens
            seconds = self._device.seconds(self._running + new, read + new, read + new * self._mix.prompt_tokens // 2)
            self._clock.at(self._clock.now + seconds, self._end_step)

    def _end_step(self) -> None:
        size = self._cutting.tokens
        ended = self._ends.pop(self._step, [])
        rests = [length % size for length in ended if length % size]
        full = self._phases[self._step % size]
        for length in ended:
            self._phases[(self._step - length) % size] -= 1
        self._running -= len(ended)
        self._step += 1
        if full or ended:
            frame = _Frame(self._clock.now, full + len(rests), full * size + sum(rests), len(ended))
            self._frames.append(frame)
            self._unlogged += frame.tokens
            self._append()
        if ended:
            self._claim()
        self._begin_step()

    # ── log ──

    def _append(self) -> None:
        """All steps that wait, in one call."""
        if self._is_appending or not self._frames:
            return
        self._is_appending = True
        frames = [self._frames.popleft()]
        while self._frames and self._num_chunks([*frames, self._frames[0]]) <= MAX_APPENDS:
            frames.append(self._frames.popleft())

        def then(effect: float) -> None:
            tokens = sum(frame.tokens for frame in frames)
            self._is_appending = False
            self._unlogged -= tokens
            if effect >= self._seen.since:
                self._seen.tokens += tokens
                self._seen.added_s += [effect - frame.at for frame in frames]
            self._to_record += sum(frame.ended for frame in frames)
            self._record()
            self._append()
            self._claim()

        self._server.call("append", self._costs.append + self._chunk_costs(frames), then)

    def _num_chunks(self, frames: list[_Frame]) -> int:
        """Tokens that are told share longer chunks where several steps wait (worker/publish/chunker.py)."""
        if not self._cutting.is_published:
            return sum(frame.chunks for frame in frames)
        longest = min(MOST_TOGETHER, max(self._cutting.tokens, len(frames)))
        tokens = sum(frame.tokens for frame in frames)
        return max(math.ceil(tokens / longest), *(frame.chunks for frame in frames), 0)

    def _chunk_costs(self, frames: list[_Frame]) -> float:
        chunks, cost = self._num_chunks(frames), self._costs.chunk
        shared = max(0, sum(frame.tokens for frame in frames) - chunks * self._cutting.tokens)
        token = (cost["chunks of 8"] - cost["token chunks"]) / 7  # each that goes along
        return chunks * cost[self._cutting.name] + shared * token

    # ── jobs ──

    def _claim(self) -> None:
        """As many as there are places; once more after a full one, which finds no place left and costs a call."""
        if self._is_claiming or self._unlogged >= MAX_UNLOGGED or not self._credits:
            return
        self._is_claiming = True
        self._ask(self._credits)

    @property
    def _credits(self) -> int:
        return self._mix.num_sequences + LOOKAHEAD - self._running - self._joining

    def _ask(self, wanted: int) -> None:
        asked_at = self._clock.now

        def then(_effect: float) -> None:
            self._joining += wanted
            if wanted and asked_at >= self._seen.since:
                self._seen.claims_s.append(self._clock.now - asked_at)
            if wanted:
                if not self._is_stepping:
                    self._begin_step()
                self._ask(self._credits)
            else:
                self._clock.at(self._clock.now + CLAIM_GAP_S, rest)

        def rest() -> None:
            self._is_claiming = False
            self._claim()

        self._server.call("claim", self._costs.claim + wanted * self._costs.claimed, then)

    def _record(self) -> None:
        if self._is_recording or not self._to_record:
            return
        self._is_recording = True
        group, self._to_record = self._to_record, 0

        def finish() -> None:
            self._server.call("finish", self._costs.finish + group * self._costs.finished, then)

        def then(effect: float) -> None:
            self._is_recording = False
            if effect >= self._seen.since:
                self._seen.jobs += group
            self._on_finished(group)
            self._record()

        self._clock.at(self._clock.now + COMMIT_S, finish)

    # ── lease ──

    def _beat(self) -> None:
        sent_at, held = self._clock.now, self._running + self._joining

        def then(_effect: float) -> None:
            if sent_at >= self._seen.since:
                self._seen.beats_s.append(self._clock.now - sent_at)
            self._clock.at(self._clock.now + HEARTBEAT_S, self._beat)

        self._server.call("heartbeat", self._costs.heartbeat + held * self._costs.held, then)
