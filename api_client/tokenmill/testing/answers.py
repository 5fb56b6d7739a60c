"""Answers of the in-memory worker: a scripted text split into tokens, and the job's result after
any number of them.

A token is a word with the white space before it; its id is its index in the answer. Thoughts come
before the text, tool calls after it: a token with the name, then one per word of the arguments. A
complete answer that breaks the JSON schema of its request gets the error `schema_violation`, as a
worker gives it. A job that scores continuations answers with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import msgspec

from tokenmill.testing.schema_check import violation, why_refused
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import NO_DEFAULTS, FinishReason, TokenLogprob
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import (
    ChoiceResult,
    GeneratedCall,
    JobError,
    JobResult,
    JobStatus,
    ScoredPrompt,
    ToolCallDelta,
    Usage,
)

OBJECT: dict[str, object] = {"type": "object"}  # the schema that `json_schema={}` means


@dataclass(frozen=True, slots=True)
class Answer:
    """A scripted answer. `hold_after`: number of tokens after which it pauses while the queue is
    held. `error`: the error with which the job fails after the text. `reasoning`: the thoughts
    before the text. `tool_calls`: name and arguments of each call after it. `total_logprobs`: those
    of the continuations that a job scores, in their order; without one, each token has -1.
    """

    text: str
    delay_s: float = 0.0  # pause before the first token
    pause_s: float = 0.0  # pause after each token
    hold_after: int | None = None
    error: JobError | None = None
    reasoning: str = ""
    tool_calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    total_logprobs: tuple[float, ...] = ()


class _Token(NamedTuple):
    """Holds the text, thoughts or piece of a call that one token adds, or its log-probability."""

    text: str = ""
    reasoning: str = ""
    call: ToolCallDelta | None = None
    logprob: float | None = None


def failure(code: str, message: str, *, after: str = "", retryable: bool = False) -> Answer:
    """Return the answer of a job that fails after generating the text `after`."""
    return Answer(after, error=JobError(code, message, retryable))


class SimulatedJob:
    """Simulates one job: its answer so far, and its end. Every choice of `n` has the same text,
    unless the request gives them; `max_tokens` limits it as in a real worker.
    """

    def __init__(
        self, request: JobRequest, reply: str | Answer, worker_id: str, *, started_ms: int
    ) -> None:
        wanted = request.params.response_format
        self._format = wanted if wanted is not None and wanted.json_schema is not None else None
        self.answer = self._refusal() or (Answer(reply) if isinstance(reply, str) else reply)
        self.num_generated = 0  # tokens generated so far, of all choices
        self._request = request
        self._worker_id = worker_id
        self._started_ms = started_ms
        self._status = JobStatus.FAILED if self.answer.error else JobStatus.SUCCEEDED
        self._prompt = _scored_prompt(request)
        echoed = "".join(_prompt_words(request)) if request.params.echo else ""
        tokens = tuple(_tokens(self.answer, echoed))
        limit = request.params.max_tokens
        self._choices_tokens = [tokens[:limit]] * request.params.n
        if request.continuations and not self.answer.error:
            self._choices_tokens = list(_given_tokens(request, self.answer.total_logprobs))
        self._reason = FinishReason.TOOL_CALLS if self.answer.tool_calls else FinishReason.STOP
        if self.answer.error:
            self._reason = FinishReason.ERROR
        elif request.continuations or (limit is not None and len(tokens) > limit):
            self._reason = FinishReason.LENGTH
        self._params = request.params.with_defaults(NO_DEFAULTS).without_content()

    @property
    def num_choices(self) -> int:
        return len(self._choices_tokens)

    @property
    def is_held(self) -> bool:
        return self.num_generated == self.answer.hold_after

    def cancel(self) -> None:
        self._status, self._reason = JobStatus.CANCELLED, FinishReason.CANCELLED

    def expire(self) -> None:
        self._status, self._reason = JobStatus.EXPIRED, FinishReason.EXPIRED

    def chunks(self) -> Iterator[Chunk]:
        """Yield one chunk per token; stop early when the job is cancelled."""
        for choice, tokens in enumerate(self._choices_tokens):
            for place, token in enumerate(tokens):
                if self._status is JobStatus.CANCELLED:
                    return
                is_end = place == len(tokens) - 1
                chunk = Chunk(
                    job_id=self._request.job_id,
                    index=place,
                    token_ids=(place,),
                    text=token.text,
                    reasoning=token.reasoning,
                    tool_calls=() if token.call is None else (self._named(token.call, choice),),
                    choice=choice,
                    logprobs=_logprobs((token,)),
                    finish_reason=self._reason if is_end else None,
                    n=self.num_choices,
                    params=None if choice or place else self._params,
                    prompt=None if choice or place else self._prompt,
                )
                self.num_generated += 1
                yield chunk

    def result(self, now_ms: int) -> JobResult:
        request = self._request
        error = self._error()
        if self._status is JobStatus.SUCCEEDED and (error := self._violation()) is not None:
            assert self._format is not None
            self._status = JobStatus.FAILED if self._format.strict else JobStatus.SUCCEEDED
        return JobResult(
            job_id=request.job_id,
            status=self._status,
            model=request.model or "in-memory",
            tenant=request.tenant,
            choices=tuple(self._choices()),
            usage=Usage(
                prompt_tokens=len(_prompt_words(request)),
                completion_tokens=self.num_generated,
                reasoning_tokens=sum(
                    bool(token.reasoning) for _, tokens in self._generated() for token in tokens
                ),
                queue_ms=max(0, self._started_ms - request.created_ms),
                total_ms=max(0, now_ms - request.created_ms),
            ),
            error=error,
            worker_id=self._worker_id,
            created_ms=request.created_ms,
            started_ms=self._started_ms,
            finished_ms=now_ms,
            metadata=request.metadata,
            params=self._params if self.num_generated else None,
            prompt=self._prompt if self.num_generated else None,
        )

    @staticmethod
    def last_chunk(result: JobResult, num_choices: int = 1) -> Chunk:
        return Chunk(
            job_id=result.job_id,
            index=len(result.token_ids),
            finish_reason=result.finish_reason,
            status=result.status,
            usage=result.usage,
            error=result.error,
            n=num_choices,
        )

    def _generated(self) -> Iterator[tuple[int, tuple[_Token, ...]]]:
        """Yield each choice with its tokens so far."""
        left = self.num_generated
        for choice, whole in enumerate(self._choices_tokens):
            tokens = whole[:left]
            left -= len(tokens)
            yield choice, tokens

    def _choices(self) -> Iterator[ChoiceResult]:
        left = self.num_generated
        for choice, tokens in self._generated():
            left -= len(tokens)
            if not tokens and self._status is not JobStatus.SUCCEEDED:
                return
            is_whole = len(tokens) == len(self._choices_tokens[choice]) and self._status in (
                JobStatus.SUCCEEDED,
                JobStatus.FAILED,
            )
            deltas = tuple(
                msgspec.structs.replace(self._named(token.call, choice), token=place)
                for place, token in enumerate(tokens)
                if token.call is not None
            )
            num_thoughts = sum(bool(token.reasoning) for token in tokens)
            yield ChoiceResult(
                index=choice,
                text="".join(token.text for token in tokens),
                token_ids=tuple(range(len(tokens))),
                text_ends=_ends(token.text for token in tokens),
                finish_reason=self._reason if is_whole or not left else FinishReason.STOP,
                logprobs=_logprobs(tokens),
                reasoning="".join(token.reasoning for token in tokens),
                reasoning_ends=_ends(token.reasoning for token in tokens[:num_thoughts]),
                tool_calls=tuple(self._calls(deltas)),
                call_deltas=deltas,
            )

    def _named(self, delta: ToolCallDelta, choice: int) -> ToolCallDelta:
        """Return the piece with the id of its call, if it is the first."""
        if not delta.name:
            return delta
        call_id = f"{self._request.job_id}-{choice}-{delta.index}"
        return msgspec.structs.replace(delta, id=call_id)

    def _calls(self, deltas: tuple[ToolCallDelta, ...]) -> Iterator[GeneratedCall]:
        for first in (delta for delta in deltas if delta.name):
            own = "".join(delta.arguments for delta in deltas if delta.index == first.index)
            whole = json.dumps(self.answer.tool_calls[first.index][1])
            yield GeneratedCall(first.id, first.name, own, own == whole)

    def _refusal(self) -> Answer | None:
        """Return the failure of a job whose JSON schema cannot be used."""
        if self._format is None:
            return None
        why = why_refused(self._format.json_schema or OBJECT)
        return None if why is None else failure("invalid_request", f"response_format: {why}")

    def _violation(self) -> JobError | None:
        """Return the error of a complete answer that breaks its JSON schema."""
        if self._format is None or self._reason is not FinishReason.STOP:
            return None
        problem = violation(
            self._format.json_schema or OBJECT,
            "".join(token.text for token in self._choices_tokens[0]),
        )
        if problem is None:
            return None
        return JobError("schema_violation", f"the answer breaks its JSON schema: {problem}")

    def _error(self) -> JobError | None:
        if self._status is JobStatus.EXPIRED:
            return JobError(
                "deadline_exceeded", "the deadline passed before the answer was complete"
            )
        return self.answer.error if self._status is JobStatus.FAILED else None


def _tokens(answer: Answer, echoed: str) -> Iterator[_Token]:
    yield from (_Token(reasoning=word) for word in _words(answer.reasoning))
    for place, word in enumerate(_words(answer.text)):
        yield _Token(text=word if place else echoed + word)
    for index, (name, arguments) in enumerate(answer.tool_calls):
        yield _Token(call=ToolCallDelta(index, name=name))
        for word in _words(json.dumps(arguments)):
            yield _Token(call=ToolCallDelta(index, arguments=word))


def _given_tokens(request: JobRequest, totals: tuple[float, ...]) -> Iterator[tuple[_Token, ...]]:
    """Yield the tokens of each continuation, which share its log-probability."""
    for given, total in zip_longest(request.continuations, totals[: len(request.continuations)]):
        words = _words(given) if isinstance(given, str) else [""] * len(given)
        logprob = -1.0 if total is None else total / len(words)
        yield tuple(_Token(text=word, logprob=logprob) for word in words)


def _logprobs(tokens: tuple[_Token, ...]) -> tuple[TokenLogprob, ...] | None:
    found = tuple(
        TokenLogprob(one.logprob, token_bytes=one.text.encode())
        for one in tokens
        if one.logprob is not None
    )
    return found or None


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", text)


def _ends(pieces: Iterable[str]) -> tuple[int, ...]:
    return tuple(accumulate(map(len, pieces)))


def _prompt_words(request: JobRequest) -> list[str]:
    if request.prompt_ids is not None:
        return [""] * len(request.prompt_ids)
    texts = [message.text for message in request.messages or ()] or [request.prompt or ""]
    return [word for text in texts for word in _words(text)]


def _scored_prompt(request: JobRequest) -> ScoredPrompt | None:
    """Return the prompt with a log-probability of -1 for each word, where one is wanted."""
    if request.params.prompt_logprobs is None:
        return None
    words = _prompt_words(request)
    ends = _ends(words) if request.params.echo else ()
    logprobs = (TokenLogprob(-1.0),) * max(0, len(words) - 1)
    return ScoredPrompt(tuple(range(len(words))), logprobs, ends)
