"""Drafts tokens by a small model, for all decoding sequences at once, before a step is planned.

The draft model's keys and values lie in the sequences' own blocks, beside those of the model, so
they are shared, preempted and moved to the host with them. Wrong ones only lower the acceptance of
drafts: the model verifies every token. A draft is drawn with the noise of its position, as the
model will draw there (see sampling/noise.py), but without penalties, biases and masks.

A sequence whose keys and values are missing gets them when it first drafts, one such sequence in a
step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.attention import AttentionBackend
from tokenmill_worker.engines.own.config.cache import CacheConfig
from tokenmill_worker.engines.own.execution.inputs import InputBuilder
from tokenmill_worker.engines.own.execution.interface import RunnerInfo
from tokenmill_worker.engines.own.kv.tensors import KVCachePool
from tokenmill_worker.engines.own.model.loader import LoadedModel
from tokenmill_worker.engines.own.model.paged_attention import PagedStep, bind_layers
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepPlan
from tokenmill_worker.engines.own.sampling import AcceptanceLimit, DraftGain, Sampler
from tokenmill_worker.engines.own.scheduler import Lookahead
from tokenmill_worker.engines.own.sequence import NULL_BLOCK, Sequence

log = logging.getLogger(__name__)
_FEW = 16  # missing tokens that a sequence computes in any step, beside the others


@dataclass(slots=True)
class _Progress:
    """The draft model's progress in one sequence."""

    limit: AcceptanceLimit
    num_computed: int  # tokens whose keys and values are in the blocks
    guess: tuple[int, ...] = ()  # drafts of the last time, which followed the computed tokens

    def settle(self, token_ids: Seq[int]) -> None:
        """Count the accepted drafts of the last time as computed.

        The last of them was drawn, but not computed.
        """
        self.limit.learn(token_ids)
        for draft, token in zip(self.guess[:-1], token_ids[self.num_computed :], strict=False):
            if draft != token:
                break
            self.num_computed += 1
        self.guess = ()


class DraftModel:
    """Owns a draft model and its state per sequence; only the engine's thread uses it.

    `guesses` are the drafts for the step to be planned. `num_passes` counts forward passes.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        info: RunnerInfo,
        backend: AttentionBackend,
        pool: KVCachePool,
        sampler: Sampler,
        gain: DraftGain | None = None,
    ) -> None:
        config, cache = info.config, info.cache_config
        self._loaded = loaded
        self._cache = cache
        self._backend = backend
        self._sampler = sampler
        self.gain = gain or DraftGain()
        self._layers = bind_layers(loaded.groups, loaded.shapes, pool.draft_layer, loaded.kv_scales)
        self._host = next(i for i, group in enumerate(cache.groups) if group.drafts)
        self._inputs = InputBuilder(cache, info.max_model_len, loaded.device, config.max_num_seqs)
        self._blocks = _DraftedBlocks(cache, self._host)
        self._is_narrow = loaded.vocab_size < info.vocab_size
        self._max_drafts = config.speculative_tokens
        self._max_tokens = config.max_num_batched_tokens
        self._states: dict[Sequence, _Progress] = {}
        self.guesses: dict[Sequence, tuple[int, ...]] = {}
        self.num_passes = 0
        self._has_failed = False

    def warm_up(self) -> None:
        """Run a prompt and a decode on the block that nobody reads, so that kernels are built."""
        tables = [[NULL_BLOCK]] * len(self._cache.groups)
        sequence = Sequence("warm-up", [0], 1, SamplingParams(seed=1), block_tables=tables)
        self._states[sequence] = _Progress(AcceptanceLimit(self._max_drafts), 0)
        self._run({sequence: 2}, [ScheduledSequence(sequence, 0, 1, True)])
        self.release(sequence)
        self._sampler.release(sequence)

    # ── a step ──

    def draft(self, lookahead: Lookahead) -> None:
        """Fill `guesses` for the step that is planned next."""
        self.guesses.clear()
        if not self.gain.begin(lookahead.num_decoding) or self._has_failed:
            return
        wanted, items = self._choose(lookahead)
        if not items:
            return
        try:
            drafted = self._run(wanted, items)
        except Exception:
            log.exception("The draft model failed: it drafts no more until the next start")
            self._has_failed = True
            return
        self.guesses |= {sequence: tuple(tokens) for sequence, tokens in drafted.items()}
        for sequence, guess in self.guesses.items():
            self._states[sequence].limit.note(guess, sequence.num_tokens)
            self._states[sequence].guess = guess
        self.gain.drafted()

    def end(self, plan: StepPlan, token_ids: Seq[tuple[int, ...]]) -> None:
        """Measure a step that has run. `token_ids` has an entry for each item that samples."""
        num_drafts = num_others = num_accepted = 0
        sampling = [item for item in plan.scheduled if item.samples]
        for item, tokens in zip(sampling, token_ids, strict=True):
            if not item.draft_ids:
                continue
            guess = self.guesses.get(item.sequence, ())
            if guess[: len(item.draft_ids)] == item.draft_ids:
                num_drafts += len(item.draft_ids)
                num_accepted += max(0, len(tokens) - 1)
            else:
                num_others += len(item.draft_ids)
        is_decode = all(item.num_tokens == 1 + len(item.draft_ids) for item in plan.scheduled)
        self.gain.end(num_drafts, num_others, num_accepted, is_decode=is_decode)

    def release(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)
        self._inputs.release(sequence)

    # ── which sequences draft ──

    def _choose(self, lookahead: Lookahead) -> tuple[dict[Sequence, int], list[ScheduledSequence]]:
        """Return the drafts of each sequence that drafts, and the first pass.

        That pass computes the tokens that are missing. One sequence that lacks many computes a
        chunk, and drafts if it is its last.
        """
        ready: list[tuple[int, Sequence, int]] = []
        behind: list[tuple[int, Sequence, int]] = []
        for sequence, most in lookahead.sequences():
            state = self._state(sequence)
            length = sequence.num_tokens
            count = min(most, state.limit.allowed(length), self._loaded.max_model_len - length)
            if count > 0:
                lacks = length - state.num_computed
                (ready if lacks <= _FEW else behind).append((lacks, sequence, count))
        if behind:
            ready.append(min(behind, key=itemgetter(0)))
        left, room = self._max_tokens, lookahead.num_free_drafts
        wanted: dict[Sequence, int] = {}
        items: list[ScheduledSequence] = []
        for lacks, sequence, most in ready:
            chunk = min(lacks, left)
            drafts = chunk == lacks
            count = lookahead.reserve(sequence, min(most, room)) if drafts else 0
            if not chunk or (drafts and not count):
                continue
            start = self._states[sequence].num_computed
            items.append(ScheduledSequence(sequence, start, chunk, drafts))
            left, room = left - chunk, room - count
            if drafts:
                wanted[sequence] = count
        return wanted, items

    def _state(self, sequence: Sequence) -> _Progress:
        state = self._states.get(sequence)
        if state is None:
            limit = AcceptanceLimit(self._max_drafts)
            state = self._states[sequence] = _Progress(limit, self._blocks.num_drafted(sequence))
        state.settle(sequence.token_ids)
        return state

    # ── forward passes ──

    @torch.inference_mode()
    def _run(
        self, wanted: dict[Sequence, int], items: list[ScheduledSequence]
    ) -> dict[Sequence, list[int]]:
        """Run the passes and return the drafts. Each pass adds one for every sequence that still
        wants one; the sequences themselves stay as the scheduler has them.
        """
        drafted: dict[Sequence, list[int]] = {sequence: [] for sequence in wanted}
        self._pass(items, drafted)
        for item in items:
            state, end = self._states[item.sequence], item.start + item.num_tokens
            state.num_computed = end
            self._blocks.note(item.sequence, item.start, end)
        for number in range(1, max(wanted.values(), default=0)):
            items = [
                ScheduledSequence(sequence, sequence.num_tokens + number - 1, 1, True)
                for sequence, count in wanted.items()
                if count > number
            ]
            self._pass(items, drafted)
        return drafted

    def _pass(self, items: list[ScheduledSequence], drafted: dict[Sequence, list[int]]) -> None:
        self.num_passes += 1
        inputs = self._inputs.build(StepPlan(-1, tuple(items)), assumed=drafted)
        ids = inputs.input_ids
        if self._is_narrow:  # a model may have more tokens than its tokenizer
            ids = ids.clamp(max=self._loaded.vocab_size - 1)
        metadata = tuple(
            replace(inputs.metadata[self._host], window=group.window)
            for group in self._loaded.groups
        )
        step = PagedStep(self._backend, self._layers, metadata, inputs.rows)
        drafting = [item for item in items if item.samples]
        layout = self._sampler.lay_out(drafting)
        arguments = (ids, inputs.positions, inputs.rows, step)
        found = self._loaded.argmax(*arguments) if drafting and layout.is_greedy else None
        if found is not None:
            tokens = found[0]
        else:
            tokens = self._sampler.guess(self._loaded.logits(*arguments), layout)
        for item, token in zip(drafting, tokens.tolist(), strict=True):
            drafted[item.sequence].append(token)


class _DraftedBlocks:
    """Remembers, by the hashes of their tokens, which blocks hold a draft model's keys and values.

    So a sequence finds those of a prefix that another one has computed.
    """

    def __init__(self, cache: CacheConfig, group: int) -> None:
        self._group = group
        self._size = cache.block_sizes[group]
        self._hashes_a_block = cache.groups[group].kernel_blocks
        self._hashes: list[bytes | None] = [None] * cache.num_blocks

    def num_drafted(self, sequence: Sequence) -> int:
        """Return how many tokens at the sequence's start have their keys and values."""
        blocks = sequence.block_tables[self._group]
        hashes = sequence.block_hashes[self._hashes_a_block - 1 :: self._hashes_a_block]
        count = 0
        for block, found in zip(blocks, hashes, strict=False):
            if self._hashes[block] != found:
                break
            count += self._size
        return min(count, sequence.num_tokens - 1)

    def note(self, sequence: Sequence, start: int, end: int) -> None:
        """Note that the keys and values of the positions [start, end) were computed."""
        first, last = start // self._size, end // self._size
        blocks = sequence.block_tables[self._group][first:last]
        hashes = sequence.block_hashes[self._hashes_a_block - 1 :: self._hashes_a_block]
        for block, found in zip(blocks, hashes[first:last], strict=False):
            self._hashes[block] = found
