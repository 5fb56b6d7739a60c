"""The choices that run in vLLM, and the event that each of its outputs makes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines.choices import RunningChoice
from tokenmill_worker.engines.vllm.plugin import taken_note

_REASONS: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.STOP,
    "abort": FinishReason.CANCELLED,
}


@dataclass(slots=True, kw_only=True)
class VllmChoice(RunningChoice):
    """One choice as one request of vLLM's. A bias stands for the presence of `biased` tokens."""

    collector: Any = None  # vLLM's RequestOutputCollector; None: another attempt is due
    biased: Collection[int] = ()

    def event(self) -> TokenEvent | None:
        """Return what vLLM has put out since the last call, or None.

        vLLM would count the presence of a biased token twice once it is drawn: the event ends
        behind that token, and another attempt is due.
        """
        if self.collector is None or self.collector.output is None:
            return None
        try:
            output = self.collector.get_nowait()
        except Exception:  # vLLM's handler of outputs has ended, and has logged why: `errored`
            return None
        one, is_first = output.outputs[0], not self.has_reported
        reason = _REASONS.get(one.finish_reason)
        if one.finish_reason and reason is None:
            if refusal := taken_note(self.key):
                return self.failed(refusal)
            return self.failed(f"vLLM ended it with {one.finish_reason!r}", "engine_error")
        tokens, logprobs, prompt = self._tokens(output, one)
        end = next((i for i, token in enumerate(tokens, 1) if token in self.biased), 0)
        if end and not (reason and end == len(tokens)):
            tokens, logprobs, reason = tokens[:end], logprobs and logprobs[:end], None
            self.collector = None
        self.drawn += tokens
        self.has_reported = True
        if output.metrics is not None:
            self.preemptions = self.preempted_before + output.metrics.num_preemptions
        cached = min(output.num_cached_tokens or 0, len(self.request.prompt))
        return TokenEvent(
            request_id=self.request.request_id,
            choice=self.index,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            num_cached_tokens=cached if is_first else 0,
            preemptions=self.preemptions,
            prompt_logprobs=prompt,
        )

    def _tokens(
        self, output: Any, one: Any
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...] | None, tuple[TokenLogprob, ...]]:
        """Return the tokens of an output, their log-probabilities, and those of the prompt."""
        params, length = self.request.params, len(self.request.prompt)
        most = params.num_top_logprobs
        if self.given:  # the token that vLLM has drawn is dropped
            ids, start = self.prompt_ids, length + len(self.resumed)
            return tuple(ids[start:]), _logprobs(output.prompt_logprobs, ids, most)[start - 1 :], ()
        prompt: tuple[TokenLogprob, ...] = ()
        if output.prompt_logprobs and params.prompt_logprobs is not None:
            ids = self.prompt_ids[:length]
            prompt = _logprobs(output.prompt_logprobs, ids, params.prompt_logprobs)
        tokens = tuple(one.token_ids)
        wanted = params.wants_logprobs and one.logprobs
        return tokens, _logprobs(one.logprobs, tokens, most) if wanted else None, prompt


def _logprobs(rows: Any, ids: Any, most: int) -> tuple[TokenLogprob, ...]:
    """Return the log-probability of each id that has a row, with the `most` likely tokens there."""
    found = []
    for row, token in zip(rows or (), ids, strict=False):
        if row is not None:  # as of the first token of a prompt
            ranked = sorted(row.items(), key=lambda pair: pair[1].rank)[:most]
            top = tuple((id_, item.logprob) for id_, item in ranked if item.rank <= most)
            found.append(TokenLogprob(row[token].logprob, top))
    return tuple(found)
