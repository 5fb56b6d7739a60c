"""Biases of sequences of tokens, repeated n-grams, and tokens that are forced or suppressed at one
position.

All biases and bans are one table: what is added to the logit of a sequence's last token where the
others precede it. A sequence of one token applies everywhere, so it is a bias of the row, which
costs the host nothing. The other rules depend on the tokens before a row or on its position. They
are computed from the tokens themselves, also those in flight and the drafts, so a resumed sequence
and a rejected draft need no bookkeeping.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sampling.grammar.bitmasks import Masks
from tokenmill_worker.engines.own.sampling.transfer import Indices, to_device
from tokenmill_worker.engines.own.sequence import Sequence


def biases(
    params: SamplingParams, end_ids: Collection[int]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield each sequence with the bias of its last token; −inf forbids it."""
    for token_id, bias in params.logit_bias.items():
        yield (token_id,), bias
    yield from {tuple(ids): bias for ids, bias in params.sequence_bias}.items()
    for ids in params.bad_words_ids:
        if len(ids) > 1 or ids[0] not in end_ids:
            yield ids, -math.inf
    for token_id in params.suppress_tokens:
        yield (token_id,), -math.inf


class RowRules(NamedTuple):
    """The rules that hold for one row of the logits."""

    row: int
    added: list[tuple[int, float]]  # tokens, and what is added to their logits
    repeated: list[int]  # tokens that would complete an n-gram again
    forced: tuple[int, ...]  # the only tokens that may be drawn; none: all may


class TokenRules:
    """The rules of one sequence that depend on the position or on the tokens before it."""

    def __init__(self, sequence: Sequence, end_ids: Collection[int]) -> None:
        params, ids = sequence.params, sequence.params.named_ids
        # the last of the tokens before → those tokens, the biased token, its bias
        self._endings: dict[int, list[tuple[list[int], int, float]]] = {}
        for (*before, last), bias in biases(params, end_ids):
            if before:
                self._endings.setdefault(before[-1], []).append((before, last, bias))
        self._ngram_size = params.no_repeat_ngram_size or 0
        first, last_ids = ids["forced_bos_token_id"], ids["forced_eos_token_id"]
        at_last = {sequence.max_tokens - 1: last_ids} if last_ids else {}
        self._forced = {**({0: first} if first else {}), **at_last}  # by output position
        self._begin, self._begin_suppressed = len(first), params.begin_suppress_tokens
        self._ids = np.zeros(0, np.int64)  # the tokens so far, and room
        self._num_known = 0

    def __bool__(self) -> bool:
        return bool(self._endings or self._ngram_size or self._forced or self._begin_suppressed)

    def of_rows(
        self, item: ScheduledSequence, in_flight: list[int], first_row: int
    ) -> Iterator[RowRules]:
        """Yield the rules of each row of an item; a row after a draft knows that draft."""
        sequence, num_drafts = item.sequence, len(item.draft_ids)
        ids = self._read(sequence.token_ids, [*in_flight, *item.forced_ids, *item.draft_ids])
        for draft in range(num_drafts + 1):
            before = ids[: len(ids) - num_drafts + draft]
            position = len(before) - sequence.num_prompt_tokens
            forced = self._forced.get(position, ())
            added = list(self._added(before, position))
            yield RowRules(first_row + draft, added, self._repeated(before), forced)

    def _read(self, token_ids: list[int], next_ids: list[int]) -> Indices:
        """Return the tokens of the sequence, of which earlier ones do not change, and the next
        ones, which may.
        """
        known, total = len(token_ids), len(token_ids) + len(next_ids)
        if total > len(self._ids):
            self._ids = np.resize(self._ids, 2 * total)
        self._ids[self._num_known : known] = token_ids[self._num_known :]
        self._ids[known:total] = next_ids
        self._num_known = known
        return self._ids[:total]

    def _added(self, before: Indices, position: int) -> Iterator[tuple[int, float]]:
        if position == self._begin:
            for token_id in self._begin_suppressed:
                yield token_id, -math.inf
        for wanted, token_id, bias in self._endings.get(int(before[-1]), ()):
            if before[-len(wanted) :].tolist() == wanted:
                yield token_id, bias

    def _repeated(self, before: Indices) -> list[int]:
        size = self._ngram_size
        count = len(before) - size + 1  # n-grams in `before`
        if not size or count < 1:
            return []
        found = np.ones(count, np.bool_)
        for place in range(size - 1):
            found &= before[place : place + count] == before[count + place]
            if not found.any():
                return []
        again: list[int] = np.unique(before[size - 1 :][found]).tolist()
        return again


def add_biases(logits: Tensor, rules: list[RowRules], masks: Masks) -> None:
    """Add the rows' biases in place, and forbid repetitions where the masks leave other tokens."""
    found = [(rule.row, token_id, bias) for rule in rules for token_id, bias in rule.added]
    for rule in rules:
        if rule.repeated and masks.leaves_others(rule.row, rule.repeated):
            found += [(rule.row, token_id, -math.inf) for token_id in rule.repeated]
    if found:
        rows, ids, values = zip(*found, strict=True)
        at = to_device(np.array((rows, ids), np.int64), logits.device)
        added = to_device(np.array(values, np.float32), logits.device)
        logits.index_put_((at[0], at[1]), added, accumulate=True)


def force_tokens(logits: Tensor, rules: list[RowRules], masks: Masks) -> None:
    """Exclude, in place, all but the forced tokens, where the masks allow one of these."""
    for rule in rules:
        if rule.forced and masks.allows_one(rule.row, rule.forced):
            logits[rule.row] = -torch.inf
            logits[rule.row, to_device(np.array(rule.forced, np.int64), logits.device)] = 0.0
