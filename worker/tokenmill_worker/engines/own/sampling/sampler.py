"""The sampler: takes logits, returns one token per row, and does not wait for the device.

Greedy rows take an argmax; the others are scaled, truncated and raced (see noise). Edits (biases,
penalties, masks) are made in place, or on a copy where log-probabilities are wanted, so that the
model's remain. Every row of a sequence with drafts uses the noise of its own position, so a draft
is accepted exactly if it is the token that would have been sampled there.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenmill_worker.engines.own.plan import Draft, ScheduledSequence
from tokenmill_worker.engines.own.sampling.batch import SamplingBatch, build
from tokenmill_worker.engines.own.sampling.draws import (
    Kernel,
    KernelSamplingBackend,
    SamplingBackend,
    TorchSamplingBackend,
)
from tokenmill_worker.engines.own.sampling.grammar.bitmasks import Masks
from tokenmill_worker.engines.own.sampling.grammar.compiler import GrammarCompiler
from tokenmill_worker.engines.own.sampling.grammar.masks import Grammars
from tokenmill_worker.engines.own.sampling.in_flight import InFlightTokens, NotArrived
from tokenmill_worker.engines.own.sampling.parameter_table import NUMBERS, ParameterTable
from tokenmill_worker.engines.own.sampling.penalties import Histories, HistoryIndex
from tokenmill_worker.engines.own.sampling.sampled import RowSpan, Sampled
from tokenmill_worker.engines.own.sampling.token_rules import RowRules, add_biases, force_tokens
from tokenmill_worker.engines.own.sampling.transfer import Indices, to_device
from tokenmill_worker.engines.own.sequence import Sequence


class Layout(NamedTuple):
    """Rows of a step's logits: their items, positions and sampling parameters."""

    spans: list[RowSpan]  # each item's rows
    positions: Indices  # in the output, by row
    batch: SamplingBatch

    @property
    def takes_argmax(self) -> bool:
        """Return whether every row needs only its highest logit."""
        batch = self.batch
        return self.is_greedy and not batch.is_edited and batch.logprobs is None

    @property
    def is_greedy(self) -> bool:
        """Return whether every row takes the highest of its logits, edited or not."""
        return self.batch.prepared.is_greedy


class Sampler:
    """Keeps a row of parameters per sequence, token histories of penalised sequences, and grammar
    states.

    Call `release` when a sequence ends or is preempted.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        """Create a sampler for one device; `kernel`, if given, samples instead of torch."""
        self.vocab_size = vocab_size
        self._device = device
        self._table = ParameterTable(vocab_size, eos_token_ids)
        self._histories = Histories(device)
        self._in_flight = InFlightTokens()
        self._grammars = Grammars(grammars, self._in_flight)
        self._backend: SamplingBackend = (
            TorchSamplingBackend(vocab_size, device)
            if kernel is None
            else KernelSamplingBackend(kernel)
        )
        self._takes_any_dtype = kernel is not None and kernel.takes_any_dtype
        self._cached: tuple[int, bytes, SamplingBatch] | None = None

    def prepare(self, items: Seq[ScheduledSequence]) -> None:
        """Start computing the grammars' masks beside the forward pass; call it before waiting for
        that pass.

        Without this call `sample` computes the masks itself.
        """
        self._grammars.start(items)

    def forced_tokens(self, sequence: Sequence) -> Draft:
        """Return the tokens that the sequence's grammar forces next."""
        return self._grammars.forced_tokens(sequence)

    def release(self, sequence: Sequence) -> None:
        """Remove a sequence; if it comes back, its state is rebuilt from its tokens."""
        self._table.release(sequence)
        self._histories.release(sequence)
        self._grammars.release(sequence)
        self._in_flight.release(sequence)

    def lay_out(self, items: Seq[ScheduledSequence]) -> Layout:
        """Prepare the sampling of the planned items that sample; item i owns 1 + len(draft_ids)
        rows.
        """
        spans: list[RowSpan] = []
        slots: list[int] = []
        positions: list[int] = []
        for item in items:
            sequence, drafts = item.sequence, len(item.draft_ids)
            first = item.start + item.num_tokens - drafts - sequence.num_prompt_tokens
            spans.append(RowSpan(len(slots), item.draft_ids, sequence.params))
            slots.append(self._table.row(sequence))
            positions.append(first)
            if drafts:
                slots.extend([slots[-1]] * drafts)
                positions.extend(range(first + 1, first + drafts + 1))
        return Layout(spans, np.array(positions, np.int64), self._batch(np.array(slots, np.int64)))

    def sample(
        self, logits: Tensor, items: Seq[ScheduledSequence], layout: Layout | None = None
    ) -> Sampled:
        """Sample a token for each row; `layout` is that of the items, if it exists already.

        `logits` [rows, vocab] may be overwritten.
        """
        spans, positions, batch = layout or self.lay_out(items)
        if logits.shape[0] != len(positions):
            raise ValueError(
                f"{logits.shape[0]} rows of logits for items that own {len(positions)}"
            )
        raw = logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]
        if raw.dtype != torch.float32 and (batch.is_edited or not self._takes_any_dtype):
            raw = raw.float()
        history = self._history_index(batch, items, spans, positions)
        work, errors = raw, {}
        if batch.is_edited:
            work = raw if batch.logprobs is None else raw.clone()
            with torch.inference_mode():  # elsewhere a model's logits cannot be written
                errors = self._edit(work, batch, items, spans, positions, history)
        token_ids, peaks = batch.prepared.draw(work, positions)
        if history is not None:
            self._histories.record(token_ids, to_device(batch.penalised, self._device), history)
        chosen = batch.logprobs.choose(raw, work, token_ids) if batch.logprobs is not None else None
        sampled = Sampled.start(token_ids, peaks, chosen, spans, errors)
        if batch.reading:
            pairs = zip(items, spans, strict=True)
            self._in_flight.launched(
                sampled, (one for one in pairs if one[1].first in batch.reading)
            )
        return sampled

    def take_argmax(self, token_ids: Tensor, peaks: Tensor, layout: Layout) -> Sampled:
        """Build the result for a layout that takes only the highest logits, whose argmax the caller
        has computed.

        `token_ids` and `peaks` are [rows].
        """
        return Sampled.start(token_ids, peaks, None, layout.spans, {})

    def guess(self, logits: Tensor, layout: Layout) -> Tensor:
        """Return the tokens `[rows]` that `sample` would draw if nothing edited the logits.

        Logits of another vocabulary's width are cut, or count as impossible where they lack.
        """
        lacking = self.vocab_size - logits.shape[1]
        if lacking > 0:
            logits = torch.nn.functional.pad(logits, (0, lacking), value=-torch.inf)
        logits = logits[:, : self.vocab_size]
        if logits.dtype != torch.float32 and not self._takes_any_dtype:
            logits = logits.float()
        return layout.batch.prepared.draw(logits, layout.positions)[0]

    # ── what is drawn ──

    def _batch(self, slots: Indices) -> SamplingBatch:
        signature = slots.tobytes()
        if self._cached is None or self._cached[:2] != (self._table.version, signature):
            self._cached = (
                self._table.version,
                signature,
                build(self._table, slots, self._backend, self._device),
            )
        return self._cached[2]

    # ── edits ──

    def _history_index(
        self,
        batch: SamplingBatch,
        items: Seq[ScheduledSequence],
        spans: list[RowSpan],
        positions: Indices,
    ) -> HistoryIndex | None:
        if batch.penalties is None:
            return None
        penalised = set(batch.penalised.tolist())
        slots: list[int] = []
        prompts: list[int] = []
        for item, span in zip(items, spans, strict=True):
            if span.first in penalised:
                slot, prompt = self._histories.open(
                    item.sequence, int(positions[span.first]), item.draft_ids, item.forced_ids
                )
                slots.extend([slot] * span.num_rows)
                prompts.extend([prompt] * span.num_rows)
        repeats = bool(
            (self._table.numbers[batch.row_slots, NUMBERS.index("repetition")] != 1.0).any()
        )
        return HistoryIndex.build(
            np.array(slots, np.int64),
            positions[batch.penalised],
            np.array(prompts, np.int64),
            repeats,
            self._device,
        )

    def _edit(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        items: Seq[ScheduledSequence],
        spans: list[RowSpan],
        positions: Indices,
        history: HistoryIndex | None,
    ) -> dict[int, str]:
        """Apply biases and bans, penalties, forced tokens, then masks, in place; return the items
        that failed.
        """
        masks = self._grammars.masks(items)
        rules, errors = self._rules(batch, items, spans)
        if batch.bias is not None:
            logits.index_put_(
                (batch.bias.rows, batch.bias.token_ids), batch.bias.values, accumulate=True
            )
        add_biases(logits, rules, masks)
        if history is not None and batch.penalties is not None:
            self._histories.apply(
                logits, to_device(batch.penalised, self._device), history, batch.penalties
            )
        self._hold_back(logits, batch, positions, masks)
        force_tokens(logits, rules, masks)
        masks.apply(logits)
        return {**errors, **masks.errors}

    def _rules(
        self, batch: SamplingBatch, items: Seq[ScheduledSequence], spans: list[RowSpan]
    ) -> tuple[list[RowRules], dict[int, str]]:
        """Return the rules of the rows that have some, and the items for which that failed."""
        found: list[RowRules] = []
        errors: dict[int, str] = {}
        if len(batch.with_rules):
            for index, (item, span) in enumerate(zip(items, spans, strict=True)):
                rules = self._table.rules.get(int(batch.row_slots[span.first]))
                if rules is None:
                    continue
                try:
                    in_flight = self._in_flight.of(item.sequence)
                except NotArrived as error:
                    errors[index] = str(error)
                else:
                    found += rules.of_rows(item, in_flight, span.first)
        return found, errors

    def _hold_back(
        self, logits: Tensor, batch: SamplingBatch, positions: Indices, masks: Masks
    ) -> None:
        """Mask the ids that would end a sequence short of its min_tokens, unless its grammar allows
        nothing else.
        """
        rows: list[int] = []
        ids: list[int] = []
        for row in batch.with_min_tokens.tolist():
            slot = int(batch.row_slots[row])
            if positions[row] < self._table.counts[slot, 1] and row not in masks.complete:
                held = self._table.held_back[slot].tolist()
                rows.extend([row] * len(held))
                ids.extend(held)
        if rows:
            at = to_device(np.array((rows, ids), np.int64), self._device)
            logits[at[0], at[1]] = -torch.inf
