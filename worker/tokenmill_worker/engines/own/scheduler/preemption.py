"""Chooses the sequence to preempt when blocks run out: lowest class first, then by `preempt`.

- `least_wasted` (default): the fewest computed tokens, which are the cheapest to recompute and the
  smallest to copy; among equals the newest.
- `newest`: the last to arrive.
- `oldest`: the first to arrive, as Transformers documents it.

A sequence that was preempted PROTECTED_AFTER times is spared while others of its class are left.
Among spared sequences the newest is chosen, so the oldest always progresses, and every sequence
finishes under every rule.
"""

from collections.abc import Callable, Iterable
from typing import Literal

from tokenmill_worker.engines.own.scheduler.queues import QueueEntry
from tokenmill_worker.engines.own.sequence import Sequence

PROTECTED_AFTER = 4
# least difference in class between a sequence and its victims: interactive over bulk
PREEMPTING_GAP = 2

Rule = Literal["least_wasted", "newest", "oldest"]
_Key = tuple[int, bool, int, int]


def _newest(sequence: Sequence, ticket: int) -> tuple[int, int]:
    return 0, ticket


def _oldest(sequence: Sequence, ticket: int) -> tuple[int, int]:
    return 0, -ticket


def _least_wasted(sequence: Sequence, ticket: int) -> tuple[int, int]:
    return -sequence.num_committed_tokens, ticket


_RULES: dict[str, Callable[[Sequence, int], tuple[int, int]]] = {
    "newest": _newest,
    "oldest": _oldest,
    "least_wasted": _least_wasted,
}


def is_protected(sequence: Sequence) -> bool:
    return sequence.preemptions >= PROTECTED_AFTER


def is_preemptible(sequence: Sequence) -> bool:
    """Return whether the most urgent class may preempt this sequence.

    The answer does not change while the sequence runs.
    """
    return sequence.priority >= PREEMPTING_GAP and not is_protected(sequence)


def victims_first(
    candidates: Iterable[Sequence], entries: dict[Sequence, QueueEntry], rule: Rule
) -> list[Sequence]:
    """Sort the candidates; the first to be preempted comes first."""
    by_rule = _RULES[rule]

    def key(sequence: Sequence) -> _Key:
        entry = entries[sequence]
        protected = is_protected(sequence)
        first, second = (
            _newest(sequence, entry.ticket) if protected else by_rule(sequence, entry.ticket)
        )
        return entry.rank, not protected, first, second

    return sorted(candidates, key=key, reverse=True)
