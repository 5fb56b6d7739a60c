"""A sequence: its tokens, how many of them are computed, and the blocks that hold their KV.

Few numbers are stored; the rest is derived. One counter, `num_computed_tokens`, follows the tokens:
prefill, decode, a cached prefix and a resumed answer are handled alike (the idea is vLLM's). Plain
Python: no torch, no numpy.

    0 ──── num_cached_tokens ──── num_computed_tokens ──── num_tokens (+ num_inflight)
           found in the cache     KV is in the blocks      token ids known on the host
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.requests import MediaSpan, Thoughts


class SequenceStatus(Enum):
    """WAITING → PREFILLING → DECODING → FINISHED; OFFLOADED: preempted, its KV is on the host."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    OFFLOADED = "offloaded"
    FINISHED = "finished"


BULK: Final = 2  # priority class whose work is held back and may be preempted
# block 0 of every group is never allocated: padding and freed window blocks point at it
NULL_BLOCK = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request.

    `block_tables[g]` lists the block ids of layer group g in position order; an entry that left a
    sliding window is NULL_BLOCK. `num_inflight` is 1 while a launched step samples a token of the
    sequence that the host does not have yet (asynchronous batching), else 0. The step being planned
    or executed does not count. If that step has drafts of the sequence, it may give several tokens;
    `num_computed_tokens` then counts all drafts, so that nothing more can be scheduled.
    """

    request_id: str
    token_ids: list[int]  # prompt, then resumed, then generated
    num_prompt_tokens: int
    params: SamplingParams
    choice: int = 0
    num_resumed_tokens: int = 0
    media: tuple[MediaSpan, ...] = ()  # of its prompt
    seed: int = 0
    priority: int = 1
    tenant: str = ""
    cache_salt: str = ""
    grammar: Any = None  # compiled grammar of the response format, or None
    thoughts: Thoughts | None = None  # where a grammar or a budget depends on them
    adapter: str = ""  # name and version of its LoRA adapter; empty: the model itself
    deadline: float | None = None
    max_tokens: int = 0  # resolved limit on output tokens, resumed ones included
    # The log-probabilities of its tokens [next_scored, scored_end), which are given, are still to
    # be reported: of its prompt, or of an answer that the caller gave.
    next_scored: int = 0
    scored_end: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_inflight: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    # hashes of full blocks, extended as tokens arrive
    block_hashes: list[bytes] = field(default_factory=list)
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    epoch: int = 0  # raised by each preemption or cancel, so that a stale step result is recognised
    # Written by the scheduler only.
    # computed by steps that succeeded; num_computed_tokens also counts steps in flight
    num_committed_tokens: int = 0
    checkpoints: tuple[int, ...] = ()  # positions at which its recurrent states are to be kept
    num_slots: int = 0  # tokens that the blocks of every group can hold now
    last_step: int = -1  # the newest step that may write its blocks
    # while OFFLOADED: host block ids, as block_tables
    host_tables: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Resumed and generated tokens: limited by max_tokens, and the sampling position."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_scoring(self) -> bool:
        """Return whether log-probabilities of given tokens are still to be reported."""
        return self.next_scored < self.scored_end

    @property
    def scores_prompt(self) -> bool:
        """Return whether the given tokens that are scored are the prompt's, not the answer's."""
        return self.scored_end <= self.num_prompt_tokens

    @property
    def num_top_scored(self) -> int:
        """The number of most likely tokens that are wanted beside each given one."""
        params = self.params
        return (params.prompt_logprobs or 0) if self.scores_prompt else params.num_top_logprobs

    @property
    def num_skippable(self) -> int:
        """Tokens whose KV may come from the prefix cache. The last token is always computed, and so
        is the token before the next one to be scored: their logits are needed, which no cache has.
        """
        return (self.next_scored if self.is_scoring else len(self.token_ids)) - 1

    @property
    def is_constrained(self) -> bool:
        """Return whether a grammar or a budget of thoughts restricts its tokens."""
        return self.params.response_format is not None or self.thoughts is not None

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]
