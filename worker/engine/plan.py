"""What one step will do: built once by the scheduler, frozen, read by the runner. Plain Python."""

from dataclasses import dataclass

import msgspec

from schemas.generation import TokenLogprob
from worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block of one layer group, from device to host or from host to device."""

    group: int
    source: int
    target: int


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """Positions [start, start + num_tokens) of a sequence are computed in this step.

    The last `len(draft_ids)` of them are proposed, not yet accepted tokens (speculative decoding);
    they are not in `sequence.token_ids`. `samples` is false for a prefill chunk that is not the last.
    `epoch` is the sequence's at planning time: a result for another epoch is stale. A msgspec struct because
    one is built per sequence and step, five times faster than a frozen dataclass.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    draft_ids: tuple[int, ...] = ()
    epoch: int = 0

    def __post_init__(self) -> None:
        if not (self.start >= 0 and 0 <= len(self.draft_ids) < self.num_tokens):
            raise ValueError(f"malformed plan for {self.sequence.request_id}: {self.start=} {self.num_tokens=}")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration. The runner does, in order: swap_out, swap_in, forward, sample."""

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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled: one entry per scheduled sequence with `samples`, in plan order.

    An entry of `token_ids` has one token, or several where drafts were accepted (the accepted drafts,
    then the token sampled after them). `logprobs` runs parallel; an entry is None where not asked for.
    `errors` maps an index of `plan.scheduled` to one sentence: that sequence failed (its logits were not
    finite, its grammar broke), the others are good; its entry in `token_ids` is empty.
    """

    step_id: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...] | None, ...]
    errors: dict[int, str]
