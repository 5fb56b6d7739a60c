"""Compares orders of eviction from the prefix cache, on chats whose users come back.

Scheduler, prefix cache and block tables are the real ones; times are those of the cost model, and
tokens are random. The cache holds few of the chats, so that blocks are evicted between two turns.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.engine import BLOCK_SIZE, SimulatedEngine
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engine.kv.block_pool import BlockPool
from tokenmill_worker.engine.sequence import Sequence

CACHES = (16_000, 32_000, 64_000)  # tokens
USERS, TURNS, PAUSE_S = 100, 6, 40.0
SYSTEM_PROMPTS, SYSTEM_TOKENS = 8, 512
VOCABULARY = 30_000


class FreedLast(BlockPool):
    """Evicts the block that was freed last; of the blocks freed in one step, tails before heads.

    Transformers documents this order.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._newest = 0  # freed last in this step

    def end_step(self) -> None:
        self._newest = 0

    def allocate(self) -> int:
        self._newest = 0
        return super().allocate()

    def share(self, block: int) -> None:
        self._newest = 0
        super().share(block)

    def release(self, block: int) -> None:
        super().release(block)
        if self.refs[block] or self.hashes[block] is None:
            return
        self._unlink(block)  # from the end of the list, where BlockPool puts it
        before = self._newest
        if not before:  # behind the unhashed blocks
            while (after := self._next[before]) and self.hashes[after] is None:
                before = after
        after = self._next[before]
        self._next[before] = self._prev[after] = self._newest = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1


class AllAtOnce(BlockPool):
    """Drops every hash of a free block as soon as no unhashed block is left.

    Transformers 5.23 does this.
    """

    def allocate(self) -> int:
        if self.hashes[self._next[0]] is not None:
            for block in list(self.cached.values()):
                if not self.refs[block]:
                    self.forget(block)
                    self.num_free_cached -= 1
        return super().allocate()


ORDERS: dict[str, type[BlockPool]] = {
    "least recently used": BlockPool,
    "freed last": FreedLast,
    "all at once": AllAtOnce,
}


@dataclass(slots=True)
class _User:
    choices: random.Random  # of its own, so that every order of eviction gets the same chats
    tokens: list[int]  # the chat so far
    turns: int = 0


class Chats:
    """Users of a few system prompts, who send their next message a pause after each answer."""

    def __init__(self, order: type[BlockPool], num_tokens: int, num_users: int, seed: int) -> None:
        self._tokens = random.Random(f"tokens/{seed}")
        limits: dict[str, object] = {"max_num_batched_tokens": 2_048, "max_num_seqs": 256}
        settings = {**limits, "prefix_cache": True}
        self._engine = SimulatedEngine(CostModel(), settings, num_tokens, self._draw)
        self._pool = order(num_tokens // BLOCK_SIZE)
        self._engine.scheduler.kv.pool = self._pool
        prompts = [self._draw(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        weights = [1 / (1 + rank) for rank in range(SYSTEM_PROMPTS)]
        sources = [random.Random(f"user/{seed}/{number}") for number in range(num_users)]
        self._users = [_User(one, list(*one.choices(prompts, weights))) for one in sources]
        self._next = [(one.uniform(0, PAUSE_S), number) for number, one in enumerate(sources)]
        heapq.heapify(self._next)
        self._running: dict[str, tuple[int, Sequence, float]] = {}
        self._ttft: list[float] = []

    def _draw(self, count: int) -> list[int]:
        return [self._tokens.randrange(1, VOCABULARY) for _ in range(count)]

    def run(self) -> dict[str, float]:
        """Serve every turn, and return the figures."""
        while self._next or self._running:
            while self._next and self._next[0][0] <= self._engine.now:
                self._send(heapq.heappop(self._next)[1])
            if not self._step():
                self._engine.now = self._next[0][0]
        stats = self._engine.scheduler.snapshot()
        return {
            "ttft_p50_s": percentile(self._ttft, 0.5),
            "ttft_p99_s": percentile(self._ttft, 0.99),
            "found": stats.cached_tokens / stats.prefix_queries,
            "computed": stats.computed_tokens,
        }

    def _send(self, number: int) -> None:
        user = self._users[number]
        answer = user.choices.choice((50, 150, 300))
        user.tokens += self._draw(user.choices.choice((20, 60, 200)))
        sequence = Sequence(
            request_id=f"{number}/{user.turns}",
            token_ids=list(user.tokens),
            num_prompt_tokens=len(user.tokens),
            params=SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True),
            max_tokens=answer,
        )
        user.turns += 1
        self._running[sequence.request_id] = number, sequence, self._engine.now
        self._engine.scheduler.add([sequence])

    def _step(self) -> bool:
        events = self._engine.step()
        if events is None:
            return False
        for event in events:
            number, sequence, sent_at = self._running[event.request_id]
            if sequence.num_output_tokens == 1:
                self._ttft.append(self._engine.now - sent_at)
            if event.finish_reason is not None:
                del self._running[event.request_id]
                self._end_turn(number, sequence)
        if isinstance(self._pool, FreedLast):
            self._pool.end_step()
        return True

    def _end_turn(self, number: int, sequence: Sequence) -> None:
        user = self._users[number]
        user.tokens = list(sequence.token_ids)
        if user.turns < TURNS:
            pause = user.choices.expovariate(1 / PAUSE_S)
            heapq.heappush(self._next, (self._engine.now + pause, number))


def measure(seed: int, waiting: Callable[[str], None]) -> dict[str, dict[str, dict[str, float]]]:
    """Run the chats with each cache and each order of eviction; return figures by cache."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for num_tokens in CACHES:
        cases = results[f"chats of {USERS} users, a prefix cache of {num_tokens:,} tokens"] = {}
        for name, order in ORDERS.items():
            waiting(f"{num_tokens:,} tokens, {name}")
            cases[name] = Chats(order, num_tokens, USERS, seed).run()
    return results
