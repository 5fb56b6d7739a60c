"""A job's answer as it grows: n choices, and the numbers for billing.

The answer is filled by the engine's events, by the log of an earlier attempt, or by the log first
and then by events. Deliveries, chunks and queues do not appear here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob
from tokenmill_schemas.result import (
    ChoiceResult,
    JobStatus,
    ScoredPrompt,
    ToolCallDelta,
    Usage,
)
from tokenmill_worker.text.chat.call_parser import CallParser
from tokenmill_worker.text.chat.reasoning import Opening
from tokenmill_worker.text.chat.thought_text import ThoughtText
from tokenmill_worker.text.choice_text import TextStream
from tokenmill_worker.text.tokenizer import Tokenizer


def deltas_of(pieces: Iterable[tuple[ToolCallDelta, ...]]) -> tuple[ToolCallDelta, ...]:
    """Return the pieces of calls, each with the place of its token."""
    return tuple(
        msgspec.structs.replace(delta, token=token) if token else delta
        for token, deltas in enumerate(pieces)
        for delta in deltas
    )


# The job's status if its choices ended differently: the first match counts.
_STATUS_OF_END = (
    (FinishReason.ERROR, JobStatus.FAILED),
    (FinishReason.CANCELLED, JobStatus.CANCELLED),
    (FinishReason.EXPIRED, JobStatus.EXPIRED),
)


@dataclass(slots=True)
class Choice:
    """One of the n sequences of an answer."""

    stream: TextStream
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.stream.token_ids)


@dataclass(slots=True)
class JobOutput:
    """The choices of one job. Times are milliseconds after the job's creation.

    `params` are those that the answer is drawn with, as the log and the result keep them.
    `prompt_ids` and `prompt_logprobs` are empty unless log-probabilities of the prompt are wanted;
    the latter grows with the events. `prompt_ends` has the length of the prompt's text after each
    token, if the text is echoed.
    """

    choices: tuple[Choice, ...]
    params: SamplingParams
    bytes_of: Callable[[int], bytes]  # the tokenizer's
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_ms: int = 0
    ttft_ms: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_ends: tuple[int, ...] = ()

    @classmethod
    def start(
        cls,
        tokenizer: Tokenizer,
        params: SamplingParams,
        opening: Opening | None = None,
        calls: Callable[[int], CallParser] | None = None,
        prompt_ids: tuple[int, ...] = (),
    ) -> JobOutput:
        """Create an empty answer, with a new text stream for each choice.

        Args:
            tokenizer: The served model's.
            params: The request's, with nothing left unnamed.
            opening: How the model begins, if its thoughts are recognised.
            calls: Makes the parser of a choice's calls, if the answer may call tools.
            prompt_ids: The prompt, which the answer may echo or have log-probabilities of.
        """
        answer = cls(
            tuple(
                Choice(
                    TextStream(
                        tokenizer.detokenizer(),
                        params.stop,
                        params.min_tokens,
                        None
                        if opening is None
                        else ThoughtText(opening.parser(), tokenizer.detokenizer),
                        None if calls is None else calls(choice),
                    ),
                    [] if params.wants_logprobs else None,
                )
                for choice in range(params.n)
            ),
            params.without_content(),
            tokenizer.bytes_of,
        )
        if params.prompt_logprobs is not None:
            answer.prompt_ids = prompt_ids
        if params.echo:
            for choice in answer.choices:
                answer.prompt_ends = choice.stream.echo(prompt_ids)
        return answer

    # ── growing ──

    def push(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None
    ) -> bool:
        """Add tokens to a choice; returns True if a stop string ended it in this call. Tokens after
        a choice's end are dropped.
        """
        choice = self.choices[index]
        if choice.finish_reason is not None:
            return False
        stream = choice.stream
        for i, token_id in enumerate(token_ids):
            stream.push(token_id)
            if choice.logprobs is not None and logprobs is not None:
                choice.logprobs.append(self._with_bytes(logprobs[i], token_id))
            if stream.stopped:
                choice.finish_reason = FinishReason.STOP
                return True
        return False

    def score_prompt(self, logprobs: Iterable[TokenLogprob]) -> None:
        """Add the log-probabilities of the prompt's next tokens."""
        ids = self.prompt_ids[len(self.prompt_logprobs) + 1 :]
        self.prompt_logprobs += map(self._with_bytes, logprobs, ids)

    def _with_bytes(self, entry: TokenLogprob, token_id: int) -> TokenLogprob:
        bytes_of = self.bytes_of
        top = tuple([bytes_of(other) for other, _ in entry.top])
        return TokenLogprob(entry.logprob, entry.top, bytes_of(token_id), top)

    def end(self, index: int, reason: FinishReason, *, with_last_token: bool) -> None:
        """End the choice and add the text that was held back. Ending it again changes nothing."""
        choice = self.choices[index]
        if choice.finish_reason is None:
            choice.stream.close(with_last_token=with_last_token)
            if choice.stream.stopped:
                reason = FinishReason.STOP
            elif reason is FinishReason.STOP and choice.stream.has_only_complete_calls:
                reason = FinishReason.TOOL_CALLS
            choice.finish_reason = reason

    def end_all(self, reason: FinishReason) -> None:
        """End every choice that has not ended."""
        for index in range(len(self.choices)):
            self.end(index, reason, with_last_token=False)

    # ── reading ──

    @property
    def num_tokens(self) -> int:
        """The tokens of all choices together."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def is_finished(self) -> bool:
        if len(self.choices) == 1:  # the usual case, checked for every token
            return self.choices[0].finish_reason is not None
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def ended_choices(self) -> tuple[int, ...]:
        """The indices of the choices that have ended."""
        return tuple(i for i, choice in enumerate(self.choices) if choice.finish_reason is not None)

    @property
    def status(self) -> JobStatus:
        reasons = {choice.finish_reason for choice in self.choices}
        for reason, status in _STATUS_OF_END:
            if reason in reasons:
                return status
        return JobStatus.SUCCEEDED

    @property
    def prompt(self) -> ScoredPrompt | None:
        """The prompt with its log-probabilities, once each is known; None if none are wanted."""
        if not self.prompt_ids or len(self.prompt_logprobs) < len(self.prompt_ids) - 1:
            return None
        return ScoredPrompt(self.prompt_ids, tuple(self.prompt_logprobs), self.prompt_ends)

    @property
    def rest(self) -> str:
        """The text after the last token's chunk, for the final chunk. Empty with several choices:
        each has a chunk for its own.
        """
        return self.choices[0].stream.rest if len(self.choices) == 1 else ""

    @property
    def reasoning_rest(self) -> str:
        """The text of thoughts after the last token's chunk; see `rest`."""
        return self.choices[0].stream.reasoning_rest if len(self.choices) == 1 else ""

    def usage_at_start(self) -> Usage:
        """Return the usage that is known at the first token. It is logged with that token, for the
        worker that resumes the job.
        """
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            queue_ms=self.queue_ms,
            ttft_ms=self.ttft_ms,
        )

    def usage(self, total_ms: int) -> Usage:
        """Return the usage so far. The prompt is billed once the answer has begun."""
        prompt_tokens = self.prompt_tokens if self.num_tokens else 0
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=min(self.cached_tokens, prompt_tokens),
            completion_tokens=self.num_tokens,
            queue_ms=self.queue_ms,
            ttft_ms=self.ttft_ms,
            total_ms=total_ms,
            preemptions=sum(choice.preemptions for choice in self.choices),
            reasoning_tokens=sum(choice.stream.num_reasoning_tokens for choice in self.choices),
        )

    def results(self) -> tuple[ChoiceResult, ...]:
        return tuple(self._result(index, choice) for index, choice in enumerate(self.choices))

    def _result(self, index: int, choice: Choice) -> ChoiceResult:
        stream = choice.stream
        return ChoiceResult(
            index=index,
            text=stream.text,
            token_ids=tuple(stream.token_ids),
            text_ends=stream.text_ends,
            finish_reason=choice.finish_reason,
            logprobs=None if choice.logprobs is None else tuple(choice.logprobs),
            reasoning=stream.reasoning,
            reasoning_ends=stream.reasoning_ends,
            tool_calls=stream.tool_calls,
            call_deltas=deltas_of(stream.call_pieces),
        )
