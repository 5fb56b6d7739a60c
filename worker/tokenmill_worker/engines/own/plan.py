"""The plan of one step: built by the scheduler, frozen, executed by the runner; plain Python."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from tokenmill_schemas.generation import TokenLogprob
from tokenmill_worker.engines.own.sequence import Sequence

# Given tokens whose log-probabilities one step computes at most. It limits the memory of their
# logits, which is this many times the vocabulary.
MAX_SCORED: Final = 256
# Draft tokens that one step verifies at most, for the same reason.
MAX_DRAFTS: Final = 256


class Draft(NamedTuple):
    """Proposed tokens of a sequence. Each of the first `num_certain` is the only one that may be
    sampled there, so it needs no logits.
    """

    token_ids: tuple[int, ...] = ()
    num_certain: int = 0


NO_DRAFT: Final = Draft()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block, from device to host or from host to device."""

    source: int
    target: int


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """Positions [start, start + num_tokens) of a sequence, computed in this step.

    The last `len(forced_ids) + len(draft_ids)` positions hold proposed tokens, which are not in
    `sequence.token_ids` yet: first `forced_ids`, which are certain, then `draft_ids`, which are
    verified (speculative decoding). The logits of the last `1 + len(draft_ids)` positions are
    computed. `samples` is false for a prefill chunk that is not the last. The log-probabilities of
    the `num_scored` tokens from `scored_from` on are wanted; that of token p follows from the
    logits of position p - 1. `epoch` is the sequence's epoch at planning time: a result for another
    epoch is stale. One is built per sequence and step; a msgspec struct is built five times faster
    than a frozen dataclass.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    draft_ids: tuple[int, ...] = ()
    epoch: int = 0
    scored_from: int = 0
    num_scored: int = 0
    forced_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num_proposed = len(self.forced_ids) + len(self.draft_ids)  # a property would cost more
        if not (self.start >= 0 and num_proposed < self.num_tokens):
            raise ValueError(
                f"malformed plan for {self.sequence.request_id}: {self.start=} {self.num_tokens=}"
            )

    @property
    def num_proposed(self) -> int:
        return len(self.forced_ids) + len(self.draft_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The runner executes in order: swap_out, swap_in, forward pass, sampling."""

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    swap_out: tuple[BlockCopy, ...] = ()  # source: device block, target: host block
    swap_in: tuple[BlockCopy, ...] = ()  # source: host block, target: device block

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def is_empty(self) -> bool:
        return not (self.scheduled or self.swap_out or self.swap_in)


class RequestFault(str):
    """An error of a sequence for which its request is to blame, such as a grammar's dead end."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step: one entry per scheduled sequence with `samples`, in plan order.

    An entry of `token_ids` has one token, or several where drafts were accepted: these drafts, then
    the token sampled after them; forced tokens are left out. `logprobs` is parallel to it; an entry
    is None if not requested. `scored` maps an index of `plan.scheduled` to the log-probabilities of
    its scored tokens. `errors` maps an index of `plan.scheduled` to one sentence. That sequence
    failed (non-finite logits, a broken grammar) and its entry in `token_ids` is empty; the others
    are valid.
    """

    step_id: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...] | None, ...]
    errors: dict[int, str]
    scored: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
