"""Structured output: masks that restrict a sequence to its grammar.

Before each mask, a sequence's matcher reads the tokens that the host has received since the last
one. So a preempted or resumed sequence is replayed, and a rejected draft needs no extra
bookkeeping. A thread computes the masks beside the forward pass. If a step is launched before the
last step's tokens have arrived, that thread waits for them while the device runs the pass.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.plan import NO_DRAFT, Draft, RequestFault, ScheduledSequence
from tokenmill_worker.engines.own.sampling.acceptance import AcceptanceLimit
from tokenmill_worker.engines.own.sampling.grammar.bitmasks import (
    Masks,
    allow_only,
    is_only,
    open_masks,
)
from tokenmill_worker.engines.own.sampling.grammar.compiler import GrammarCompiler
from tokenmill_worker.engines.own.sampling.grammar.errors import LATER, GrammarError
from tokenmill_worker.engines.own.sampling.grammar.sources import sentence
from tokenmill_worker.engines.own.sampling.grammar.words import MAX_FORCED
from tokenmill_worker.engines.own.sampling.in_flight import InFlightTokens
from tokenmill_worker.engines.own.sequence import Sequence

TOKEN_LIMIT_S = 0.25  # CPU seconds to read a token or to compute a mask; the step waits for it
# Most grammars take less than 0.001 s for a token. An answer may take 2 s, and 0.01 s for each of
# its tokens: their matchers' memory grows with the time, too.
ANSWER_LIMIT_S = 2.0
MEAN_LIMIT_S = 0.01


@dataclass(slots=True)
class _MatcherState:
    matcher: Any
    epoch: int
    limit: AcceptanceLimit = field(default_factory=lambda: AcceptanceLimit(MAX_FORCED, MAX_FORCED))
    num_read: int = 0  # output tokens that the matcher has read; they do not change within an epoch
    # tokens read since the last mask, and their CPU seconds
    unchecked: tuple[int, float] = (0, 0.0)
    num_checked: int = 0  # tokens read and masks computed
    spent_s: float = 0.0  # CPU seconds for them


class Grammars:
    """One matcher per sequence with structured output."""

    def __init__(self, compiler: GrammarCompiler | None, in_flight: InFlightTokens) -> None:
        self._compiler = compiler
        self._in_flight = in_flight
        self._states: dict[Sequence, _MatcherState] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._pending: tuple[tuple[ScheduledSequence, ...], Future[Masks]] | None = None

    def __len__(self) -> int:
        return len(self._states)

    def start(self, items: Seq[ScheduledSequence]) -> None:
        """Begin to compute the masks of these items; `masks` with the same items returns them."""
        self._wait()
        if any(item.sequence.is_constrained for item in items):
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._pending = (tuple(items), self._thread.submit(self._compute, tuple(items)))

    def masks(self, items: Seq[ScheduledSequence]) -> Masks:
        pending, self._pending = self._pending, None
        if pending is not None:
            found = pending[1].result()
            if pending[0] == tuple(items):
                return found
        return self._compute(tuple(items))

    def forced_tokens(self, sequence: Sequence) -> Draft:
        """Return the next tokens of a sequence whose grammar leaves one text; else none.

        They follow the tokens that the host has, and are as many as the acceptance of earlier ones
        allows: the model may cut the text of some grammars into other tokens. A token that the
        grammar refuses is reported by the next mask.
        """
        if not sequence.is_constrained:
            return NO_DRAFT
        self._wait()
        started_s = time.thread_time()
        with contextlib.suppress(Exception):  # the next mask fails alike, with the reason
            state = self._state_of(sequence)
            num_read, num_certain = state.num_read, 0
            try:
                _read(state, sequence.token_ids[sequence.num_prompt_tokens + num_read :])
                forced = self._limited(state, sequence)
                num_certain = self._num_certain(state.matcher, forced, sequence.params)
                return Draft(forced, num_certain)
            finally:
                (earlier, earlier_s), new = state.unchecked, state.num_read - num_read
                spent_s = time.thread_time() - started_s
                state.unchecked = (earlier + new + num_certain, earlier_s + spent_s)
        return NO_DRAFT

    @staticmethod
    def _limited(state: _MatcherState, sequence: Sequence) -> tuple[int, ...]:
        limit, length = state.limit, sequence.num_tokens
        limit.learn(sequence.token_ids)
        num_allowed = limit.allowed(length)
        if not num_allowed or state.matcher.is_terminated():
            return ()
        forced = tuple(state.matcher.forced_tokens(num_allowed + sequence.num_inflight))
        limit.note(forced, length)
        return forced

    def _num_certain(self, matcher: Any, token_ids: tuple[int, ...], params: SamplingParams) -> int:
        """Count the leading tokens of which each is the only one that its mask allows.

        0 where their logits matter all the same: for their log-probabilities, or because a bias, a
        ban or `min_tokens` may exclude them.
        """
        if not token_ids or params.wants_logprobs or params.min_tokens or params.edits_tokens:
            return 0
        words = open_masks(1, self._vocab_size)
        count = 0
        for token_id in token_ids:
            if matcher.is_terminated():
                break
            matcher.fill_next_token_bitmask(words, 0)
            if not is_only(words[0], [token_id]) or not matcher.accept_token(token_id):
                break
            count += 1
        if count:
            matcher.rollback(count)
        return count

    def release(self, sequence: Sequence) -> None:
        if sequence.is_constrained:
            self._wait()
            self._states.pop(sequence, None)

    def _wait(self) -> None:
        """Wait for a computation whose result was not used, since only one thread at a time may
        change states.
        """
        if self._pending is not None:
            self._pending[1].exception()
            self._pending = None

    def _compute(self, items: tuple[ScheduledSequence, ...]) -> Masks:
        rows: list[int] = []
        filled: list[Tensor] = []
        errors: dict[int, str] = {}
        complete: set[int] = set()
        first = 0
        for index, item in enumerate(items):
            if item.sequence.is_constrained:
                try:
                    mask, ends = self._fill(item)
                except Exception as error:  # any failure of a grammar ends only its own sequence
                    errors[index] = _failure(error)
                else:
                    rows.extend(range(first, first + len(mask)))
                    filled.append(mask)
                    complete.update(first + row for row in ends)
            first += 1 + len(item.draft_ids)
        words = torch.cat(filled) if filled else None
        return Masks(tuple(rows), words, self._vocab_size, errors, frozenset(complete))

    def _fill(self, item: ScheduledSequence) -> tuple[Tensor, list[int]]:
        """Return the masks of an item's rows [1 + drafts, words], and its rows at which only the
        end is allowed.

        Rows after a draft that the grammar refuses stay open: that draft is never sampled, so they
        never count. Raises GrammarError, also for a grammar that is too ambiguous: its cost grows
        with every token and would delay every step.
        """
        state = self._state_of(item.sequence)
        new = [*self._unread(item.sequence, state), *item.forced_ids]
        started_s = time.thread_time()
        _read(state, new)
        matcher = state.matcher
        stops = [int(i) for i in matcher.stop_token_ids]
        words = open_masks(1 + len(item.draft_ids), self._vocab_size)
        ends: list[int] = []
        taken = 0
        for row in range(1 + len(item.draft_ids)):
            if matcher.is_terminated():
                allow_only(words[row], stops)
            else:
                matcher.fill_next_token_bitmask(words, row)
            if item.sequence.params.min_tokens and is_only(words[row], stops):
                ends.append(row)
            if row == len(item.draft_ids):
                break
            if matcher.is_terminated():
                continue
            if not matcher.accept_token(item.draft_ids[row]):
                break
            taken += 1
        if taken:
            matcher.rollback(taken)
        (read, read_s), state.unchecked = state.unchecked, (0, 0.0)
        spent_s = read_s + time.thread_time() - started_s
        _check_cost(state, read + len(new) + len(words), spent_s)
        return words, ends

    @property
    def _vocab_size(self) -> int:
        return int(self._compiler.tokenizer_info.vocab_size) if self._compiler else 0

    def _state_of(self, sequence: Sequence) -> _MatcherState:
        """Return the sequence's state, or a new one if its epoch has changed, since tokens may have
        been withdrawn.
        """
        state = self._states.get(sequence)
        if state is None or state.epoch != sequence.epoch:
            state = self._states[sequence] = _MatcherState(self._start(sequence), sequence.epoch)
        return state

    def _unread(self, sequence: Sequence, state: _MatcherState) -> list[int]:
        """Return output tokens that the matcher has not read; it may have read the one in flight
        already.
        """
        position = sequence.num_prompt_tokens + state.num_read
        new = sequence.token_ids[position:]
        return new + self._in_flight.of(sequence) if position <= len(sequence.token_ids) else new

    def _start(self, sequence: Sequence) -> Any:
        compiler, wanted = self._compiler, sequence.params.response_format
        if compiler is None:
            raise GrammarError("the engine has no grammar compiler for this model", LATER)
        # a sequence added without request validation has no compiled grammar
        if wanted is not None and sequence.grammar is None:
            sequence.grammar = compiler.compile(wanted).result(compiler.limits.wall_s + 1)
        return compiler.matcher(sequence.grammar, sequence.thoughts)


def _check_cost(state: _MatcherState, count: int, spent_s: float) -> None:
    """Note what so many tokens took; raise GrammarError if that is too much."""
    state.num_checked += count
    state.spent_s += spent_s
    limit_s = TOKEN_LIMIT_S
    if spent_s / count <= limit_s:
        if state.spent_s <= ANSWER_LIMIT_S + MEAN_LIMIT_S * state.num_checked:
            return
        limit_s = MEAN_LIMIT_S
    raise GrammarError(
        f"its grammar is too ambiguous: one token takes more than {limit_s:g} s to check"
    )


def _failure(error: Exception) -> str:
    message = f"structured output failed: {sentence(error)}"
    is_fault = isinstance(error, GrammarError) and error.code != LATER
    return RequestFault(message) if is_fault else message


def _read(state: _MatcherState, new: list[int]) -> None:
    """Advance the matcher by new tokens; raises GrammarError for a token that the grammar
    refuses.
    """
    for token_id in new:
        # after its end only end tokens follow (ignore_eos), which the matcher need not see
        if not state.matcher.is_terminated() and not state.matcher.accept_token(token_id):
            raise GrammarError(
                f"token {token_id} at output position {state.num_read} is not in the grammar", LATER
            )
        state.num_read += 1
