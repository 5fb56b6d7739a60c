"""The choices that run in vLLM, and the event that each of its outputs makes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.v1.engine.exceptions import EngineDeadError

from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.engines.vllm.parameters import logprob_of
from tokenmill_worker.engines.vllm.plugin import refusal_of

_REASONS: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.STOP,
    "abort": FinishReason.CANCELLED,
}


@dataclass(slots=True)
class RunningChoice:
    """One choice of a request, as one request of vLLM's.

    `resumed` are tokens of the answer that stand in vLLM's prompt: those of an earlier worker, and
    those that this one drew before it took the choice's place.
    """

    request: GenerationRequest
    choice: int
    resumed: tuple[int, ...]
    limit: int = 0  # tokens of the answer, those that are resumed included
    since: float = field(default_factory=time.time)  # vLLM's order among equal priorities
    attempt: int = 0
    collector: Any = None  # vLLM's RequestOutputCollector
    drawn: list[int] = field(default_factory=list)  # in this attempt
    has_reported: bool = False
    preemptions: int = 0
    _preempted_before: int = 0  # in earlier attempts

    @property
    def key(self) -> str:
        """vLLM's id of it, another one for each attempt."""
        return f"{self.request.request_id}#{self.choice}.{self.attempt}"

    @property
    def prompt_ids(self) -> list[int]:
        given = self.request.given[self.choice] if self.request.given else ()
        return [*self.request.prompt.token_ids, *(given or self.resumed)]

    @property
    def may_be_displaced(self) -> bool:
        """Return whether another attempt can go on behind its tokens. A seed goes on exactly where
        vLLM's noise is keyed by position.
        """
        params = self.request.params
        waits_for_prompt = params.prompt_logprobs is not None and not self.has_reported
        return not (self.request.given or waits_for_prompt or params.presence_penalty)

    def displace(self) -> None:
        """Move what it has drawn into the prompt of another attempt."""
        self.resumed += tuple(self.drawn)
        self.drawn, self.collector = [], None
        self._preempted_before = self.preemptions = self.preemptions + 1
        self.attempt += 1

    def event(self) -> TokenEvent | None:
        """Return what vLLM has put out since the last call, or None."""
        if self.collector is None or self.collector.output is None:
            return None
        try:
            output = self.collector.get_nowait()
        except EngineDeadError:  # each of them ends with the engine, and may run elsewhere
            return None
        except Exception as error:  # vLLM puts an error of this request here
            return self.failed(f"{type(error).__name__}: {error}", "engine_error")
        one, is_first = output.outputs[0], not self.has_reported
        self.has_reported = True
        if output.metrics is not None:
            self.preemptions = self._preempted_before + output.metrics.num_preemptions
        reason = _REASONS.get(one.finish_reason) if one.finish_reason else None
        if one.finish_reason and reason is None:
            if refusal := refusal_of(self.key):
                return self.failed(refusal, "invalid_request")
            return self.failed(f"vLLM ended it with {one.finish_reason!r}", "engine_error")
        tokens, logprobs, prompt = self._tokens(output, one)
        self.drawn += tokens
        return TokenEvent(
            request_id=self.request.request_id,
            choice=self.choice,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            num_cached_tokens=self._cached(output) if is_first else 0,
            preemptions=self.preemptions,
            prompt_logprobs=prompt,
        )

    def ended(self, reason: FinishReason) -> TokenEvent:
        return TokenEvent(
            request_id=self.request.request_id, choice=self.choice, finish_reason=reason
        )

    def failed(self, message: str, code: str) -> TokenEvent:
        return TokenEvent(
            request_id=self.request.request_id,
            choice=self.choice,
            finish_reason=FinishReason.ERROR,
            error=" ".join(message.split()),
            error_code=code,
        )

    def _cached(self, output: Any) -> int:
        return min(output.num_cached_tokens or 0, len(self.request.prompt))

    def _tokens(
        self, output: Any, one: Any
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...] | None, tuple[TokenLogprob, ...]]:
        """Return the tokens of an output, their log-probabilities, and those of the prompt."""
        request, params = self.request, self.request.params
        most, length = params.num_top_logprobs, len(request.prompt)
        ids = self.prompt_ids
        if request.given:
            start = length + len(self.resumed)
            return tuple(ids[start:]), _rows(output, ids, most)[start - 1 :], ()
        prompt: tuple[TokenLogprob, ...] = ()
        if output.prompt_logprobs and params.prompt_logprobs is not None:
            prompt = _rows(output, ids, params.prompt_logprobs)[: length - 1]
        tokens = tuple(one.token_ids)
        if not params.wants_logprobs or not one.logprobs:
            return tokens, None, prompt
        rows = zip(one.logprobs, tokens, strict=True)
        return tokens, tuple(logprob_of(row, token, most) for row, token in rows), prompt


def _rows(output: Any, ids: list[int], most: int) -> tuple[TokenLogprob, ...]:
    """Return the log-probability of each token of vLLM's prompt but the first."""
    rows = zip(output.prompt_logprobs or (), ids, strict=False)
    return tuple(logprob_of(row, token, most) for row, token in rows if row is not None)
