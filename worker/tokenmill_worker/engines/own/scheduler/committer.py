"""Applies the result of a step (tokens, ends, block hashes), or undoes a step that failed.

A result is matched by epoch. Results for a sequence that was preempted, cancelled or ended
meanwhile are stale and dropped. If an end is found while the next step is already in flight, that
step computes one token too many for the sequence; nothing else is lost.
"""

from __future__ import annotations

from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines.own.plan import RequestFault, ScheduledSequence, StepOutput, StepPlan
from tokenmill_worker.engines.own.scheduler.state import (
    DECODING,
    OFFLOADED,
    PREFILLING,
    SchedulerState,
)
from tokenmill_worker.engines.own.sequence import Sequence
from tokenmill_worker.engines.own.types import SchedulingPolicy


class Committer:
    """Commits or abandons planned steps."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._eos = state.eos_token_ids
        self._charges = state.config.policy is SchedulingPolicy.PRIORITY
        self._block_size, self._tracks_every_token = (
            state.kv.block_size,
            state.kv.tracks_every_token,
        )

    def commit(self, plan: StepPlan, output: StepOutput) -> list[TokenEvent]:
        """Apply the output; return one event per sequence that got tokens or ended.

        Raises:
            ValueError: the output belongs to another step.
        """
        state = self._state
        if plan.step_id not in state.in_flight or output.step_id != plan.step_id:
            raise ValueError(
                f"output of step {output.step_id} for step {plan.step_id}, "
                f"in flight: {[*state.in_flight]}"
            )
        copies = state.in_flight.pop(plan.step_id)
        events: list[TokenEvent] = []
        row = computed = 0
        for index, item in enumerate(plan.scheduled):
            computed += item.num_tokens
            tokens: tuple[int, ...] = ()
            logprobs = None
            samples = item.samples
            if samples:
                tokens, logprobs = output.token_ids[row], output.logprobs[row]
                row += 1
            if item.sequence.epoch != item.epoch:
                continue
            if samples and copies.is_counted:
                item.sequence.num_inflight -= 1
            if output.errors and index in output.errors:
                error = output.errors[index]
                is_fault = isinstance(error, RequestFault)
                code = "invalid_request" if is_fault else "engine_error"
                events.append(state.end(item.sequence, FinishReason.ERROR, str(error), code))
            else:
                if item.num_scored:
                    events.append(self._take_scores(item, output.scored[index]))
                if samples:
                    events.append(self._take_tokens(item, item.forced_ids + tokens, logprobs))
                else:
                    events += self._advance(item)
        state.counters.computed_tokens += computed
        state.kv.tier.commit(copies, state.kv.pool)
        state.kv.release_deferred(next(iter(state.in_flight), None))
        return events

    def _take_scores(
        self, item: ScheduledSequence, logprobs: tuple[TokenLogprob, ...]
    ) -> TokenEvent:
        """Note that log-probabilities of given tokens are known, and return them."""
        sequence, start = item.sequence, item.scored_from
        sequence.next_scored = start + item.num_scored
        is_answer = not sequence.scores_prompt
        is_first = start == sequence.num_prompt_tokens + sequence.num_resumed_tokens
        return TokenEvent(
            request_id=sequence.request_id,
            choice=sequence.choice,
            token_ids=tuple(sequence.token_ids[start : sequence.next_scored]) if is_answer else (),
            logprobs=logprobs if is_answer else None,
            prompt_logprobs=() if is_answer else logprobs,
            num_cached_tokens=sequence.num_cached_tokens if is_answer and is_first else 0,
            preemptions=sequence.preemptions,
        )

    def _advance(self, item: ScheduledSequence) -> list[TokenEvent]:
        """Commit a chunk that sampled nothing. It is the last one of a sequence whose answer was
        given.
        """
        sequence, end = item.sequence, item.start + item.num_tokens
        self._state.kv.advance(sequence, end)
        if end < sequence.num_tokens:
            return []
        return [self._state.end(sequence, FinishReason.LENGTH)]

    def _take_tokens(
        self,
        item: ScheduledSequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
    ) -> TokenEvent:
        """Append forced and sampled tokens, commit computed positions, and finish the sequence at
        its end.
        """
        state, sequence = self._state, item.sequence
        ids = sequence.token_ids
        is_first = len(ids) == sequence.num_prompt_tokens + sequence.num_resumed_tokens
        reason = None
        count = 0
        for token in tokens:
            ids.append(token)
            count += 1
            num_output = len(ids) - sequence.num_prompt_tokens
            if (
                token in self._eos
                or num_output >= sequence.max_tokens
                or sequence.params.stop_token_ids
            ):
                reason = self._end_of(sequence, token, num_output)
                if reason is not None:
                    break
        end = item.start + item.num_tokens
        if item.num_proposed:
            tokens = tokens[:count]
            logprobs = logprobs and logprobs[:count]
            end -= self._settle_drafts(item, count)
        if item.num_tokens > 1 or end % self._block_size == 0 or self._tracks_every_token:
            state.kv.advance(sequence, end)
        else:
            sequence.num_committed_tokens = end
        state.counters.generated_tokens += count
        if self._charges:
            state.queue.charge(sequence.tenant, count)
        if reason is not None:
            state.finish(sequence, reason)
        return TokenEvent(
            request_id=sequence.request_id,
            choice=sequence.choice,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens if is_first else 0,
            preemptions=sequence.preemptions,
        )

    def _settle_drafts(self, item: ScheduledSequence, accepted: int) -> int:
        """Take the counter back over the rejected drafts and return their number.

        The sequence keeps their blocks for later tokens.
        """
        rejected = item.num_proposed + 1 - accepted
        self._state.counters.draft_tokens += item.num_proposed
        self._state.counters.accepted_tokens += accepted - 1
        item.sequence.num_computed_tokens -= rejected
        return rejected

    def _end_of(self, sequence: Sequence, token: int, num_output: int) -> FinishReason | None:
        params = sequence.params
        if num_output >= params.min_tokens and (
            (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= sequence.max_tokens else None

    def abandon(self, plan: StepPlan) -> None:
        """Undo a step that failed.

        Counters go back, and blocks that the step should have filled or copied lose their hashes.
        Sequences whose blocks it should have copied are reset.
        """
        state = self._state
        copies = state.in_flight.pop(plan.step_id, None)
        if copies is None:
            return
        for item in plan.scheduled:
            if item.sequence.epoch == item.epoch:
                self._roll_back(item.sequence)
        for sequence in copies.restored:
            # this step's copies fill its blocks, whatever was planned since
            if sequence.status in (PREFILLING, DECODING):
                state.reset(sequence)
        for sequence in copies.offloaded:
            if sequence.status is OFFLOADED:
                state.reset(sequence)
        state.kv.tier.undo(copies)
        state.kv.release_deferred(next(iter(state.in_flight), None))

    def _roll_back(self, sequence: Sequence) -> None:
        """Take the counters back to the committed tokens and raise the epoch.

        The new epoch makes the results of steps planned on top of this one stale.
        """
        sequence.num_computed_tokens = sequence.num_committed_tokens
        sequence.num_inflight = 0
        sequence.epoch += 1
        self._state.kv.unregister(sequence)
