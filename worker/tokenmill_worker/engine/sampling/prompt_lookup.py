"""Draft tokens by prompt lookup: the tokens that followed the last time the sequence ended as it
does now.

An index from each run of `min_match` tokens to the positions after it grows with the sequence, so a
proposal costs a few look-ups at any length. Rejected proposals make the next ones shorter and then
rarer, until proposals are accepted again. The result of a proposal is read from the sequence
itself. The module is plain Python: no torch, no numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from tokenmill_worker.engine.sequence import Sequence

MIN_MATCH = 3
_MAX_COMPARED = 24  # how far back a candidate's match is extended, in tokens
_MAX_CANDIDATES = 8
# a long prompt is indexed over several steps, so that no single step is slow
_INDEXED_PER_CALL = 2_000
_LONGEST_PAUSE = 256


class NgramIndex:
    """Positions by the `size` tokens before them, most recent first."""

    __slots__ = ("_earlier", "_latest", "_size", "length")

    def __init__(self, size: int) -> None:
        self._size = size
        self.length = 0  # tokens indexed
        self._latest: dict[
            int, int
        ] = {}  # hash of a run → the position after its latest occurrence
        self._earlier = array(
            "i"
        )  # position → the position after the run's occurrence before it, or -1

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
        while (
            len(draft) < max_tokens
        ):  # the match reaches the sequence's end: continue the repetition
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
    budget: int  # tokens to propose next
    pause: int = 1  # tokens without a proposal after the next failure
    quiet_until: int = 0  # length of the sequence before which nothing is proposed
    draft: tuple[int, ...] = ()
    drafted_at: int = 0  # length of the sequence when the draft was made


@dataclass(slots=True)
class PromptLookup:
    """Proposes drafts for the scheduler, which calls it with a sequence; only one thread may use
    it.
    """

    max_tokens: int
    min_match: int = MIN_MATCH
    _states: dict[Sequence, _DraftState] = field(default_factory=dict)

    def __call__(self, sequence: Sequence) -> tuple[int, ...]:
        """Return up to `max_tokens` draft tokens; () where nothing matches or drafts do not pay."""
        if not sequence.params.speculate or sequence.num_inflight:
            return ()
        state = self._states.get(sequence)
        if state is None:
            first = max(1, min(self.max_tokens, 4))
            state = self._states[sequence] = _DraftState(NgramIndex(self.min_match), first)
        token_ids = sequence.token_ids
        self._learn(state, token_ids)
        state.index.extend(token_ids, _INDEXED_PER_CALL)
        if len(token_ids) < state.quiet_until or state.index.length < len(token_ids) - 1:
            return ()
        state.draft = state.index.continuation(token_ids, min(state.budget, self.max_tokens))
        state.drafted_at = len(token_ids)
        return state.draft

    def release(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def __len__(self) -> int:
        return len(self._states)

    def _learn(self, state: _DraftState, token_ids: Seq[int]) -> None:
        """Compare the last draft with the tokens that came.

        A fully accepted draft doubles the next one. Failures first shorten the next draft, then
        pause.
        """
        draft, state.draft = state.draft, ()
        came = token_ids[state.drafted_at : state.drafted_at + len(draft)]
        if not draft or not came:
            return
        accepted = next(
            (i for i, (a, b) in enumerate(zip(draft, came, strict=False)) if a != b), len(came)
        )
        if accepted == len(draft):
            state.budget, state.pause = min(self.max_tokens, 2 * state.budget), 1
        elif 2 * accepted >= len(draft):
            state.pause = 1
        elif accepted:
            state.budget = max(1, accepted)
        else:
            state.budget = max(1, state.budget // 2)
            state.quiet_until = len(token_ids) + state.pause
            state.pause = min(_LONGEST_PAUSE, 2 * state.pause)
