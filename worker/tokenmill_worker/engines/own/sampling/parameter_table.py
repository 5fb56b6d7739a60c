"""Table of sampling parameters: one row per live sequence, filled once, gathered by index.

A change of the batch's composition costs one numpy gather and a few small copies to the device. A
step with the same composition as the last costs neither. All arrays are on the host.
"""

from __future__ import annotations

import math
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from tokenmill_schemas.generation import SamplingNumbers
from tokenmill_worker.engines.own.sampling.token_rules import TokenRules, biases
from tokenmill_worker.engines.own.sequence import Sequence

GREEDY_BELOW = 1e-5  # a lower temperature would overflow


class ParamFlags(IntFlag):
    """Flags of a row that needs more than a plain draw."""

    GREEDY = 1
    TRUNCATED = 2  # top-k or top-p; min-p alone needs no order
    MIN_P = 4
    PENALISED = 8
    BIASED = 16
    MIN_TOKENS = 32
    GRAMMAR = 64
    LOGPROBS = 128
    PROCESSED_LOGPROBS = 256  # of the distribution that is drawn from; else of the model's
    RULES = 512  # TokenRules


# the host computes their edits from the tokens before the row
READING = ParamFlags.GRAMMAR | ParamFlags.RULES
EDITED = READING | ParamFlags.PENALISED | ParamFlags.BIASED | ParamFlags.MIN_TOKENS


class ParameterTable:
    """Sampling parameters by sequence; a released row is reused."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], capacity: int = 64) -> None:
        self.vocab_size = vocab_size
        self._eos = eos_token_ids
        self.version = 0  # raised when a row is filled, so that cached gathers are dropped
        self._rows: dict[Sequence, int] = {}
        self._free: list[int] = list(range(capacity - 1, -1, -1))
        self.flags = np.zeros(capacity, np.int32)
        self.seeds = np.zeros(capacity, np.uint64)
        self.numbers = np.zeros((capacity, len(NUMBERS)), np.float64)
        self.counts = np.zeros((capacity, len(COUNTS)), np.int64)
        self.bias: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}
        # ids that end a sequence: masked until min_tokens
        self.held_back: dict[int, npt.NDArray[np.int64]] = {}
        self.rules: dict[int, TokenRules] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, sequence: Sequence) -> int:
        found = self._rows.get(sequence)
        return self._fill(sequence) if found is None else found

    def release(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence, None)
        if row is not None:
            self.bias.pop(row, None)
            self.held_back.pop(row, None)
            self.rules.pop(row, None)
            self._free.append(row)

    def _fill(self, sequence: Sequence) -> int:
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._rows[sequence] = row
        self.version += 1
        params = sequence.params
        numbers = params.numbers
        top_k = numbers.top_k if 0 < numbers.top_k < self.vocab_size else self.vocab_size
        self.seeds[row] = sequence.seed & ((1 << 64) - 1)
        log_min_p = math.log(numbers.min_p) if numbers.min_p > 0 else -math.inf
        self.numbers[row] = (
            numbers.temperature,
            numbers.top_p,
            log_min_p,
            params.presence_penalty,
            params.frequency_penalty,
            numbers.repetition_penalty,
        )
        self.counts[row] = (top_k, params.min_tokens, params.num_top_logprobs)
        self._fill_ids(row, sequence)
        self.flags[row] = self._flags(row, sequence, numbers, top_k)
        return row

    def _fill_ids(self, row: int, sequence: Sequence) -> None:
        """Store biases, rules and held-back ids.

        Request validation refuses ids outside the vocabulary; one that comes anyway is ignored.
        """
        params = sequence.params
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        bias = [(ids[0], value) for ids, value in biases(params, end_ids) if len(ids) == 1]
        known = [(i, value) for i, value in bias if 0 <= i < self.vocab_size]
        if known:
            ids, values = zip(*known, strict=True)
            self.bias[row] = (np.array(ids, np.int64), np.array(values, np.float32))
        if params.min_tokens > 0:
            self.held_back[row] = np.array(
                sorted(i for i in end_ids if 0 <= i < self.vocab_size), np.int64
            )
        if rules := TokenRules(sequence, end_ids):
            self.rules[row] = rules

    def _flags(self, row: int, sequence: Sequence, numbers: SamplingNumbers, top_k: int) -> int:
        params = sequence.params
        greedy = numbers.temperature < GREEDY_BELOW or top_k == 1 or numbers.top_p == 0.0
        penalised = (
            params.presence_penalty or params.frequency_penalty or numbers.repetition_penalty != 1.0
        )
        flags = (
            (greedy, ParamFlags.GREEDY),
            (not greedy and (top_k < self.vocab_size or numbers.top_p < 1.0), ParamFlags.TRUNCATED),
            (numbers.min_p > 0, ParamFlags.MIN_P),
            (penalised, ParamFlags.PENALISED),
            (row in self.bias, ParamFlags.BIASED),
            (params.min_tokens > 0, ParamFlags.MIN_TOKENS),
            (sequence.is_constrained, ParamFlags.GRAMMAR),
            (params.wants_logprobs, ParamFlags.LOGPROBS),
            (params.logprobs_mode == "processed_logprobs", ParamFlags.PROCESSED_LOGPROBS),
            (row in self.rules, ParamFlags.RULES),
        )
        return int(sum(int(flag) for holds, flag in flags if holds))

    def _grow(self) -> None:
        old = len(self.flags)
        self._free.extend(range(2 * old - 1, old - 1, -1))
        self.flags, self.seeds = np.resize(self.flags, 2 * old), np.resize(self.seeds, 2 * old)
        self.numbers = np.resize(self.numbers, (2 * old, len(NUMBERS)))
        self.counts = np.resize(self.counts, (2 * old, len(COUNTS)))


NUMBERS = ("temperature", "top_p", "log_min_p", "presence", "frequency", "repetition")
COUNTS = ("top_k", "min_tokens", "num_top_logprobs")
