"""Restricts an answer that may begin with thoughts: a budget ends them, and a grammar binds behind
them.

The matcher has the interface of a grammar's matcher, so preemption, resuming and drafts treat it as
one. Its state is a few numbers per token, kept until the thoughts end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from tokenmill_worker.contract.requests import Thoughts
from tokenmill_worker.engines.own.sampling.grammar.words import MAX_FORCED

_ALL: Final = -1  # a word of a mask that allows each of its 32 tokens


class _State(NamedTuple):
    phase: str  # "before", "header", "inside" or "behind" the thoughts
    last: tuple[int, ...] = ()  # the newest tokens, at most as many as end the thoughts
    spent: int = 0  # tokens of thoughts
    closed: int = 0  # tokens of `closing` that were forced


class ThoughtsMatcher:
    """Tracks one sequence. `inner` matches what follows the thoughts; None allows everything."""

    def __init__(self, thoughts: Thoughts, inner: Any, stop_token_ids: Sequence[int]) -> None:
        self.stop_token_ids = [int(i) for i in stop_token_ids]
        self._thoughts = thoughts
        self._inner = inner
        self._states = [_State(self._first_phase(thoughts))]
        self._num_inner = 0  # tokens that the inner matcher has read
        self._num_behind = 0  # tokens behind the thoughts, or without thoughts

    @staticmethod
    def _first_phase(thoughts: Thoughts) -> str:
        if not thoughts.is_open:
            return "before"
        return "inside" if thoughts.start is None else "header"

    def is_terminated(self) -> bool:
        return self._phase == "behind" and self._inner is not None and self._inner.is_terminated()

    def accept_token(self, token_id: int) -> bool:
        """Read a token; return False, and change nothing, if it is not allowed."""
        state = self._states[-1]
        if state.phase == "behind" or (state.phase == "before" and token_id != self._start):
            return self._accept_behind(token_id)
        if (forced := self._forced(state)) is not None and token_id != forced:
            return False
        self._states.append(self._next(state, token_id, forced is not None))
        return True

    def rollback(self, num_tokens: int) -> None:
        behind = min(num_tokens, self._num_behind)
        inner = min(behind, self._num_inner)
        if inner and self._inner is not None:
            self._inner.rollback(inner)
        self._num_behind -= behind
        self._num_inner -= inner
        if num_tokens > behind:
            del self._states[behind - num_tokens :]

    def forced_tokens(self, most: int = MAX_FORCED) -> list[int]:
        """Return what the inner matcher forces behind the thoughts."""
        if self._inner is None or self._phase != "behind" or self._inner.is_terminated():
            return []
        found: list[int] = self._inner.forced_tokens(most)
        return found

    def fill_next_token_bitmask(self, words: Tensor, row: int) -> None:
        state = self._states[-1]
        forced = self._forced(state)
        mask = words[row]
        if forced is not None:
            mask.zero_()
            _set(mask, forced, allowed=True)
        elif self._phase in ("before", "behind"):
            self._fill_inner(words, row)
            if self._phase == "before" and self._start is not None:
                _set(mask, self._start, allowed=True)
        else:
            mask.fill_(_ALL)
            if self._inner is not None:  # an answer is due: it cannot end within thoughts
                for token_id in self.stop_token_ids:
                    _set(mask, token_id, allowed=False)

    @property
    def _start(self) -> int | None:
        return self._thoughts.start

    @property
    def _phase(self) -> str:
        return "behind" if self._num_behind else self._states[-1].phase

    def _accept_behind(self, token_id: int) -> bool:
        if self._inner is not None:
            if not self._inner.is_terminated():
                if not self._inner.accept_token(token_id):
                    return False
                self._num_inner += 1
            elif token_id not in self.stop_token_ids:
                return False
        self._num_behind += 1
        return True

    def _fill_inner(self, words: Tensor, row: int) -> None:
        if self._inner is None:
            words[row].fill_(_ALL)
        else:
            self._inner.fill_next_token_bitmask(words, row)

    def _forced(self, state: _State) -> int | None:
        """Return the only token that may follow; None where several may."""
        thoughts = self._thoughts
        if self._num_behind or thoughts.budget is None:
            return None
        if state.phase == "header" and not thoughts.budget:
            return thoughts.end[state.closed]
        if state.phase == "inside" and (state.closed or state.spent >= thoughts.budget):
            return thoughts.closing[state.closed]
        return None

    def _next(self, state: _State, token_id: int, is_forced: bool) -> _State:
        if state.phase == "before":
            return _State("inside")
        end = self._thoughts.end
        last = (*state.last, token_id)[-len(end) :]
        if last == end:
            return _State("behind")
        closed = state.closed + is_forced
        if state.phase == "header":
            is_over = token_id == self._start and not is_forced
            return _State("inside" if is_over else "header", last, 0, closed)
        return _State("inside", last, state.spent + (not is_forced), closed)


def _set(mask: Tensor, token_id: int, *, allowed: bool) -> None:
    view = mask.numpy().view(np.uint32)
    bit = np.uint32(1 << (token_id % 32))
    if allowed:
        view[token_id // 32] |= bit
    else:
        view[token_id // 32] &= ~bit
