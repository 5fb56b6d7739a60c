"""A step under construction: its remaining budgets, and the sequences scheduled so far."""

from dataclasses import dataclass, field

from tokenmill_worker.engine.plan import ScheduledSequence
from tokenmill_worker.engine.sequence import Sequence


@dataclass(slots=True)
class Step:
    """A step being planned.

    `tokens` and `reads` are the remaining budgets; `reads` is None without a read budget. A planning
    phase may spend `room`: it sets `reserve` to the tokens that it leaves for later phases.
    """

    step_id: int
    tokens: int
    reads: int | None = None
    reserve: int = 0
    items: list[ScheduledSequence] = field(default_factory=list)
    admitted: set[Sequence] = field(default_factory=set)
    has_preempted: bool = False
    # scheduled first: the previous step had too few reads left for it
    favoured: Sequence | None = None
    only: frozenset[Sequence] | None = None

    @property
    def room(self) -> int:
        return self.tokens - self.reserve

    def add(
        self, sequence: Sequence, end: int, samples: bool, draft_ids: tuple[int, ...] = ()
    ) -> None:
        """Schedule the sequence up to position `end`, then its drafts; its counter advances at once."""
        start = sequence.num_computed_tokens
        num_tokens = end - start + len(draft_ids)
        self.items.append(
            ScheduledSequence(sequence, start, num_tokens, samples, draft_ids, sequence.epoch)
        )
        sequence.num_computed_tokens = start + num_tokens
        sequence.last_step = self.step_id
        self.tokens -= num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is preempted after all from the step.

        `State.preempt` resets its counters.
        """
        for index, item in enumerate(self.items):
            if item.sequence is sequence:
                del self.items[index]
                self.tokens += item.num_tokens
                return
