"""Executes plans: moves blocks, runs the model on packed tokens, samples.

A step is launched, then finished. In between its tokens are on the device only, and the next step
may already be launched on top of them. The scheduler has decided what to compute; the runner has no
policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenmill_schemas.generation import SamplingParams, TokenLogprob
from tokenmill_worker.engines.own.device import Graphs, StepInputs
from tokenmill_worker.engines.own.execution.inputs import PreviousTokens
from tokenmill_worker.engines.own.execution.parts import RunnerParts
from tokenmill_worker.engines.own.model.paged_attention import PagedStep
from tokenmill_worker.engines.own.plan import StepOutput, StepPlan
from tokenmill_worker.engines.own.sampling import Layout, Sampled, ScoredRows, Scores
from tokenmill_worker.engines.own.sequence import Sequence


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step.

    `indices[i]` is the index in `plan.scheduled` of the i-th sequence that samples.
    """

    plan: StepPlan
    indices: tuple[int, ...]
    sampled: Sampled | None  # None: no sequence samples in this step
    done: torch.cuda.Event | None = None  # set if none samples and the device is asynchronous
    scores: Scores | None = None  # None: no given token is scored in this step


class ModelRunner:
    """Runs steps by the parts that `parts.py` builds; used by one thread."""

    def __init__(self, parts: RunnerParts) -> None:
        self.info, self.hooks = parts.info, parts.hooks
        self.draft_model = parts.draft_model
        self._loaded = parts.loaded
        self._device = parts.loaded.device
        self._backend = parts.backend
        self._layers = parts.layers
        self._offloader = parts.offloader
        self._inputs = parts.inputs
        self._sampler = parts.sampler
        self._grammars = parts.grammars
        self._adapters = parts.adapters
        self._states = parts.states
        self._drafts = parts.drafts
        self._previous: PreviousTokens | None = None
        self.graphs: Graphs | None = self._device.graphs(
            self.forward, self.info.config, self.info.max_model_len
        )

    # ── a step ──

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Queue a step on the device; its tokens may feed the next step before `finish`."""
        if self._loaded.fused_pass is not None:
            # it calls few torch operators: inference mode costs more than it saves
            return self._launch(plan)
        with torch.inference_mode():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> InFlightStep:
        self._offloader.run(plan)
        previous, self._previous = self._previous, None
        if not plan.scheduled:
            return InFlightStep(plan, (), None, self._device.end_of_queue())
        inputs, graphs = self._adapted(plan, self._inputs.build(plan, previous))
        if self._states is not None:
            inputs = self._states.added(plan, inputs)
        indices = tuple(index for index, item in enumerate(plan.scheduled) if item.samples)
        items = [plan.scheduled[index] for index in indices]
        self._sampler.prepare(items)
        scored = ScoredRows.of(plan.scheduled)
        if scored is not None:  # a graph has no rows of given tokens
            graphs = None
        layout = self._sampler.lay_out(items) if items else None
        sampled, scores = None, None
        if graphs is None and scored is None and layout is not None and layout.takes_argmax:
            sampled = self._argmax(inputs, layout)
        if sampled is None:
            logits = self.forward(inputs) if graphs is None else graphs.run(inputs)
            if self._states is not None:
                self._states.keep(plan, inputs)
            if scored is not None:
                logits, scores = scored.take(logits, self.info.vocab_size)
            if layout is None:
                return InFlightStep(plan, (), None, self._device.end_of_queue(), scores)
            sampled = self._sampler.sample(logits, items, layout)
        self._previous = PreviousTokens(sampled.token_ids, items)
        return InFlightStep(plan, indices, sampled, scores=scores)

    def _adapted(self, plan: StepPlan, inputs: StepInputs) -> tuple[StepInputs, Graphs | None]:
        """Return the inputs with the adapters' slots, and the graphs if one may run the step."""
        if self._adapters is None:
            return inputs, self.graphs
        is_adapted, slot_of_row = self._adapters.apply(plan)
        may_replay = slot_of_row is not None or not is_adapted
        inputs = replace(inputs, adapter_slots=slot_of_row)
        return inputs, self.graphs if may_replay else None

    def finish(self, step: InFlightStep) -> StepOutput:
        """Wait for the step's tokens, or for its end if none are sampled.

        Waiting in both cases keeps the host at most one step ahead.
        """
        scores: dict[int, tuple[TokenLogprob, ...]] = {}
        errors: dict[int, str] = {}
        if step.scores is not None:
            scores, errors = step.scores.finish()
        if step.sampled is None:
            if step.done is not None:
                step.done.synchronize()
            return StepOutput(step.plan.step_id, (), (), errors, scores)
        tokens, logprobs, failed = step.sampled.finish()
        if self.draft_model is not None:
            self.draft_model.end(step.plan, tokens)
        errors |= {step.indices[i]: error for i, error in failed.items()}
        return StepOutput(step.plan.step_id, tokens, logprobs, errors, scores)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Return the logits of the needed rows: `[num_rows, vocab]`."""
        return self._loaded.logits(*self._arguments(inputs))

    def _argmax(self, inputs: StepInputs, layout: Layout) -> Sampled | None:
        """Sample the most likely tokens without the logits; return None if no pass does that."""
        found = self._loaded.argmax(*self._arguments(inputs))
        return None if found is None else self._sampler.take_argmax(*found, layout)

    def _arguments(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor, PagedStep]:
        """Return the arguments of the model's pass; let it add the adapters in slots."""
        if self._adapters is not None and inputs.adapter_slots is not None:
            self._adapters.use_slots(inputs.adapter_slots, inputs.rows)
        step = PagedStep(
            self._backend, self._layers, inputs.metadata, inputs.rows, inputs.recurrence
        )
        return inputs.input_ids, inputs.positions, inputs.rows, step

    # ── around the steps ──

    def prepare(self, params: SamplingParams, tenant: str = "") -> Future[Any] | None:
        """Start compiling a grammar, outside the step; return None if the parameters need none."""
        return None if self._grammars is None else self._grammars.prepare(params, tenant)

    def prepare_adapter(self, name: str) -> Future[str]:
        """Start loading an adapter in its current version; the future gives that version's key.

        The future fails with AdapterError if the adapter cannot be used.
        """
        assert self._adapters is not None, "requests name adapters that are served"
        return self._adapters.prepare(name)

    def release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            row = self._inputs.release(sequence)
            if self._states is not None and row is not None:
                self._states.pool.release(row)
            self._sampler.release(sequence)
            if self._drafts is not None:
                self._drafts.release(sequence)
            if self.draft_model is not None:
                self.draft_model.release(sequence)

    def is_alive(self) -> bool:
        """Return whether the device works; after a permanent failure every call on it fails."""
        return self._device.is_alive()

    def close(self) -> None:
        for part in (self.hooks.disk, self._offloader, self._adapters, self._grammars):
            if part is not None:
                part.close()
