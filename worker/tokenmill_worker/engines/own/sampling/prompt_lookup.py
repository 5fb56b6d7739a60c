"""Draft tokens by prompt lookup: the tokens that followed the last time the sequence ended as it
does now.

An index from each run of `min_match` tokens to the positions after it grows with the sequence, so a
proposal costs a few look-ups at any length. Plain Python: no torch, no numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from tokenmill_worker.engines.own.sampling.acceptance import AcceptanceLimit
from tokenmill_worker.engines.own.sequence import Sequence

MIN_MATCH = 3
_MAX_COMPARED = 24  # how far back a candidate's match is extended, in tokens
_MAX_CANDIDATES = 8
# a long prompt is indexed over several steps, so that no single step is slow
_INDEXED_PER_CALL = 2_000


class NgramIndex:
    """Positions by the `size` tokens before them, most recent first."""

    __slots__ = ("_earlier", "_latest", "_size", "length")

    def __init__(self, size: int) -> None:
        self._size = size
        self.length = 0  # tokens indexed
        # hash of a run → the position after its latest occurrence
        self._latest: dict[int, int] = {}
        # position → the position after the run's occurrence before it, or -1
        self._earlier = array("i")

    def extend(self, token_ids: Seq[int], limit: int) -> None:
        """Index up to `limit` more tokens."""
        size, latest, earlier = self._size, self._latest, self._earlier
        for end in range(self.length + 1, min(len(token_ids), self.length + limit) + 1):
            # the position `end` follows the run token_ids[end - size : end]
            if end < size:
                earlier.append(-1)
                continue
            key = hash(tuple(token_ids[end - size : end]))
            earlier.append(latest.get(key, -1))
            latest[key] = end
        self.length = max(self.length, min(len(token_ids), self.length + limit))

    def continuation(self, token_ids: Seq[int], max_tokens: int) -> tuple[int, ...]:
        """Return the tokens after the longest earlier match of the sequence's end; the latest of
        equal matches wins.
        """
        end = len(token_ids)
        if end < self._size or max_tokens < 1:
            return ()
        place = self._latest.get(hash(tuple(token_ids[end - self._size :])), -1)
        best, best_length = -1, self._size - 1
        for _ in range(_MAX_CANDIDATES):
            if place < 0:
                break
            if place < end and (length := _match_length(token_ids, place)) > best_length:
                best, best_length = place, length
            place = self._earlier[place - 1]
        if best < 0:
            return ()
        draft = list(token_ids[best : best + max_tokens])
        # the match reaches the sequence's end: continue the repetition
        while len(draft) < max_tokens:
            draft.append(draft[len(draft) - (end - best)])
        return tuple(draft)


def _match_length(token_ids: Seq[int], place: int) -> int:
    """Count the tokens before `place` that equal those at the sequence's end."""
    end = len(token_ids)
    for back in range(1, min(place, _MAX_COMPARED) + 1):
        if token_ids[place - back] != token_ids[end - back]:
            return back - 1
    return min(place, _MAX_COMPARED)


@dataclass(slots=True)
class _DraftState:
    index: NgramIndex
    limit: AcceptanceLimit


@dataclass(slots=True)
class PromptLookup:
    """Proposes drafts for the scheduler, which calls it with a sequence; only one thread may use
    it.
    """

    max_tokens: int
    min_match: int = MIN_MATCH
    _states: dict[Sequence, _DraftState] = field(default_factory=dict)

    def __call__(self, sequence: Sequence) -> tuple[int, ...]:
        """Return up to `max_tokens` draft tokens, after the one in flight if there is one; () where
        nothing matches or drafts do not pay.
        """
        if not sequence.params.speculate:
            return ()
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = _DraftState(
                NgramIndex(self.min_match), AcceptanceLimit(self.max_tokens)
            )
        index, limit, token_ids = state.index, state.limit, sequence.token_ids
        limit.learn(token_ids)
        index.extend(token_ids, _INDEXED_PER_CALL)
        num_allowed = limit.allowed(len(token_ids))
        if not num_allowed or index.length < len(token_ids) - 1:
            return ()
        draft = index.continuation(token_ids, num_allowed + sequence.num_inflight)
        limit.note(draft, len(token_ids))
        return draft

    def release(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def __len__(self) -> int:
        return len(self._states)
