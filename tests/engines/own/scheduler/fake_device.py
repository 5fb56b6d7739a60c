"""A device without a model, for tests: wrong bookkeeping gives wrong content.

The "KV" of a position is a digest of all tokens up to it. Before a sequence's tokens are computed,
every slot that they would attend to is read through its block tables and compared. The next token
is a function of the tokens alone. Steps are computed in the order of their launch, like a device's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from tokenmill_schemas.generation import TokenLogprob
from tokenmill_worker.engines.own.config.cache import CacheConfig, first_visible
from tokenmill_worker.engines.own.plan import BlockCopy, ScheduledSequence, StepOutput, StepPlan
from tokenmill_worker.engines.own.sequence import NULL_BLOCK, Sequence

VOCABULARY = 50
EOS = 0
PROBE = "probe"  # the scheduler's own sequence, which writes to blocks that are not read


class WrongContentError(Exception):
    """A block table, a copy or a cached block gave a sequence another sequence's past.

    It is no RuntimeError, which is what the tests' own failing steps raise.
    """


def chain(before: bytes, token: int) -> bytes:
    return blake2b(before + token.to_bytes(4, "little", signed=True), digest_size=8).digest()


def next_token(state: bytes, seed: int = 0) -> int:
    """Return the next token; 1 in 50 is EOS."""
    return (
        int.from_bytes(
            blake2b(state + seed.to_bytes(8, "little"), digest_size=4).digest(), "little"
        )
        % VOCABULARY
    )


def score(state: bytes, token: int) -> TokenLogprob:
    """Return the log-probability of a token after this state."""
    return TokenLogprob(-float(int.from_bytes(chain(state, token)[:4], "little")))


def expected_scores(sequence: Sequence) -> list[TokenLogprob]:
    """Return the log-probabilities of the given tokens that are still to be reported."""
    scores, state = [], b""
    for position, token in enumerate(sequence.token_ids[: sequence.scored_end]):
        if position >= sequence.next_scored:
            scores.append(score(state, token))
        state = chain(state, token)
    return scores


def expected_tokens(sequence: Sequence, eos: int | None = EOS) -> list[int]:
    """Return the tokens that the sequence generates alone, or that it was given: the truth for
    every schedule.
    """
    if sequence.num_output_tokens >= sequence.max_tokens:
        return sequence.token_ids[sequence.next_scored :]
    state = b""
    for token in sequence.token_ids:
        state = chain(state, token)
    generated: list[int] = []
    count = sequence.num_resumed_tokens
    while True:
        token = next_token(state, sequence.seed)
        generated.append(token)
        count += 1
        state = chain(state, token)
        is_eos = (
            token == eos and not sequence.params.ignore_eos and count >= sequence.params.min_tokens
        )
        if is_eos or token in sequence.params.stop_token_ids or count >= sequence.max_tokens:
            return generated


Block = list[bytes | None]


@dataclass(slots=True)
class FakeDevice:
    """Executes plans over slots.

    `fails(plan)` returns whether a step fails, before or, with half of the copies done, after it
    copied blocks.
    """

    cache: CacheConfig
    fails: Callable[[StepPlan], bool] = lambda plan: False
    computed: int = 0
    steps: int = 0
    _device: list[Block] = field(default_factory=list)
    _host: list[Block] = field(default_factory=list)
    # ids that the host may not know yet
    _sampled: dict[tuple[Sequence, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = max(self.cache.block_sizes)
        self._device = [[None] * size for _ in range(self.cache.num_blocks)]
        self._host = [[None] * size for _ in range(self.cache.num_host_blocks)]

    def execute(self, plan: StepPlan) -> StepOutput:
        if self.fails(plan):
            self.spoil(plan)
            raise RuntimeError("the step failed")
        self.steps += 1
        self._copy(sorted(plan.swap_out, key=lambda copy: copy.target), self._device, self._host)
        self._copy(sorted(plan.swap_in, key=lambda copy: copy.source), self._host, self._device)
        scores: dict[int, tuple[TokenLogprob, ...]] = {}
        answers = [self._run(item, index, scores) for index, item in enumerate(plan.scheduled)]
        self._must_not_overlap(plan)
        sampled = tuple(
            tuple(tokens)
            for item, tokens in zip(plan.scheduled, answers, strict=True)
            if item.samples
        )
        logprobs = tuple(tuple(TokenLogprob(-1.0) for _ in tokens) for tokens in sampled)
        return StepOutput(plan.step_id, sampled, logprobs, {}, scores)

    def spoil(self, plan: StepPlan) -> None:
        """Overwrite with garbage all that a failing step was to write."""
        for copies, pools in ((plan.swap_out, self._host), (plan.swap_in, self._device)):
            for copy in copies:
                pools[copy.target] = [b"garbage"] * len(pools[copy.target])
        for item in plan.scheduled:
            for group, table in enumerate(item.sequence.block_tables):
                for position in range(item.start, item.start + item.num_tokens):
                    self._write(group, table, position, b"garbage")

    def _copy(self, copies: list[BlockCopy], sources: list[Block], targets: list[Block]) -> None:
        """Copy block by block in the host's order: the smallest parts that are possible."""
        seen = {copy.target for copy in copies}
        if len(seen) < len(copies):
            raise WrongContentError("two copies of one step have the same target")
        for copy in copies:
            targets[copy.target] = list(sources[copy.source])

    def _write(self, group: int, table: list[int], position: int, content: bytes) -> None:
        size = self.cache.block_sizes[group]
        self._device[table[position // size]][position % size] = bytes((group,)) + content

    def _run(
        self, item: ScheduledSequence, index: int, scores: dict[int, tuple[TokenLogprob, ...]]
    ) -> list[int]:
        sequence, end = item.sequence, item.start + item.num_tokens
        self.computed += item.num_tokens
        known = end - item.num_proposed
        tokens = list(sequence.token_ids[:known])
        tokens += [self._sampled[sequence, position] for position in range(len(tokens), known)]
        tokens += item.forced_ids + item.draft_ids
        states, state = [], b""
        for token in tokens:
            state = chain(state, token)
            states.append(state)
        for group, table in enumerate(sequence.block_tables):
            self._check_past(group, table, item, states)
            for position in range(item.start, end):
                self._write(group, table, position, states[position])
        if item.num_scored:
            scores[index] = self._score(item, states)
        if not item.samples:
            return []
        return self._sample(item, states, known + len(item.forced_ids))

    def _score(self, item: ScheduledSequence, states: list[bytes]) -> tuple[TokenLogprob, ...]:
        positions = range(item.scored_from, item.scored_from + item.num_scored)
        if not item.start < positions[0] <= positions[-1] <= item.start + item.num_tokens:
            raise WrongContentError(
                f"{item.sequence.request_id}: logits of {positions} are not computed in this step"
            )
        tokens = item.sequence.token_ids
        return tuple(score(states[p - 1], tokens[p]) for p in positions)

    def _check_past(
        self, group: int, table: list[int], item: ScheduledSequence, states: list[bytes]
    ) -> None:
        sequence = item.sequence
        window, size = self.cache.groups[group].window, self.cache.block_sizes[group]
        for position in range(first_visible(item.start, window), item.start):
            block, own = table[position // size], bytes((group,)) + states[position]
            if block == NULL_BLOCK or self._device[block][position % size] != own:
                name = f"{sequence.request_id}/{sequence.choice}"
                raise WrongContentError(
                    f"{name}: position {position} of group {group} in block {block} is not its own"
                )
        for position in range(item.start, item.start + item.num_tokens):
            if table[position // size] == NULL_BLOCK and sequence.request_id != PROBE:
                raise WrongContentError(f"position {position} would be written to the null block")

    def _sample(self, item: ScheduledSequence, states: list[bytes], known: int) -> list[int]:
        """Return the token after each row, up to the first draft that sampling rejects."""
        tokens: list[int] = []
        for position in range(known - 1, len(states)):
            token = next_token(states[position], item.sequence.seed)
            tokens.append(token)
            self._sampled[item.sequence, position + 1] = token
            accepted = position + 1 - known
            if accepted >= len(item.draft_ids) or item.draft_ids[accepted] != token:
                break
        return tokens

    def _must_not_overlap(self, plan: StepPlan) -> None:
        """No two sequences or groups of a step write into one block."""
        written: dict[int, tuple[Sequence, int]] = {}
        for item in plan.scheduled:
            for group, table in enumerate(item.sequence.block_tables):
                size = self.cache.block_sizes[group]
                for index in range(
                    item.start // size, (item.start + item.num_tokens - 1) // size + 1
                ):
                    writer = item.sequence, group
                    if table[index] and written.setdefault(table[index], writer) != writer:
                        raise WrongContentError(f"block {table[index]} is written twice")
