"""The choices that run in vLLM: the parameters of each, and the event that each output makes.

What vLLM cannot do, the capabilities name. It reads the resumed tokens of an answer as prompt, so
its penalties, which count an answer's tokens, are corrected here by biases.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tokenmill_schemas.generation import LOGPROBS_MODES, FinishReason, TokenLogprob
from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import choice_seed
from tokenmill_worker.engines.choices import RunningChoice
from tokenmill_worker.engines.vllm.config import MAX_BIASES, MAX_STOP_IDS
from tokenmill_worker.engines.vllm.plugin import EXTRA, BoundAnswer, taken_note

_SEEDS: Final = (1 << 63) - 1  # vLLM takes signed ones
FORBIDDEN: Final = -1e9  # bias of a token that must not occur
_NEVER_TEXT: Final[dict[str, Any]] = {
    "detokenize": False, "output_kind": RequestOutputKind.DELTA,
    "skip_clone": True,  # these objects are made for one choice
}  # fmt: skip
_REASONS: Final = {
    "stop": FinishReason.STOP, "repetition": FinishReason.STOP, "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
}  # fmt: skip
Logprobs = tuple[TokenLogprob, ...]


@dataclass(slots=True, kw_only=True)
class VllmChoice(RunningChoice):
    """One choice as one request of vLLM's. A bias stands for the presence of `biased` tokens."""

    collector: Any = None  # vLLM's RequestOutputCollector; None: another attempt is due
    biased: frozenset[int] = frozenset()

    def params(self, eos: tuple[int, ...], capabilities: Capabilities) -> SamplingParams:
        """Return vLLM's parameters. Raises ValueError for what vLLM has no room for.

        Without `exact_resume` a seed is another one behind each place, because the first draws
        would repeat themselves.
        """
        params, num_resumed = self.request.params, len(self.resumed)
        if params.wants_logprobs and params.logprobs_mode not in (None, LOGPROBS_MODES[0]):
            raise ValueError(f"logprobs_mode {params.logprobs_mode} is not available with vLLM")
        if self.given:
            top = params.num_top_logprobs
            return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=top, **_NEVER_TEXT)
        if params.min_tokens and len({*params.stop_token_ids, *eos}) > MAX_STOP_IDS:
            raise ValueError(f"beside min_tokens, vLLM takes {MAX_STOP_IDS} stop_token_ids")
        numbers, seed = params.numbers, params.seed
        if seed is not None:
            seed = choice_seed(seed & _SEEDS, self.index)
            if num_resumed and not capabilities.exact_resume:
                seed = choice_seed(seed, num_resumed + 1)
        return SamplingParams(
            max_tokens=self.num_left, min_tokens=self.num_required,
            temperature=numbers.temperature, top_p=numbers.top_p or 1.0,
            top_k=1 if numbers.top_p == 0.0 and numbers.temperature else max(0, numbers.top_k),
            min_p=numbers.min_p, seed=seed, ignore_eos=params.ignore_eos,
            stop_token_ids=list(params.stop_token_ids), presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=numbers.repetition_penalty,
            logit_bias=self._biases("logit_bias" not in capabilities.unavailable) or None,
            logprobs=params.num_top_logprobs if params.wants_logprobs else None,
            prompt_logprobs=None if self.index or num_resumed else params.prompt_logprobs,
            **self._constrained(), **_NEVER_TEXT,
        )  # fmt: skip

    def _biases(self, may_correct: bool) -> dict[int, float]:
        """Return the biases that a request names, less what its penalties take from resumed tokens.

        vLLM adds biases, then divides a logit above 0 by the repetition penalty. So the penalties
        are exact for each token whose logit is above 0 also behind them.
        """
        params = self.request.params
        biases = dict(params.logit_bias) | dict.fromkeys(params.suppress_tokens, FORBIDDEN)
        if len(biases) > MAX_BIASES:
            raise ValueError(f"logit_bias and suppress_tokens may have {MAX_BIASES} ids with vLLM")
        presence, frequency = params.presence_penalty, params.frequency_penalty
        if not may_correct or not (presence or frequency):
            return biases
        factor = params.numbers.repetition_penalty
        counts = Counter(self.resumed).items()
        taken = {token: factor * (presence + frequency * count) for token, count in counts}
        room = MAX_BIASES - len(biases)
        greatest = heapq.nlargest(room, taken, key=lambda token: abs(taken[token]))
        return biases | {token: biases.get(token, 0.0) - taken[token] for token in greatest}

    def _constrained(self) -> dict[str, Any]:
        """Name our grammar; vLLM itself learns only that there is one."""
        form, thoughts = self.request.params.response_format, self.request.thoughts
        if form is None and thoughts is None:
            return {}
        answer = BoundAnswer(form, thoughts, len(self.resumed), self.request.tenant, self.key)
        return {
            "structured_outputs": StructuredOutputsParams(json_object=True),
            "extra_args": {EXTRA: msgspec.json.encode(answer).decode()},
        }

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
        one = output.outputs[0]
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
        if output.metrics is not None:
            self.preemptions = self.preempted_before + output.metrics.num_preemptions
        return self.drew(tokens, reason, logprobs, prompt, output.num_cached_tokens or 0)

    def _tokens(self, output: Any, one: Any) -> tuple[tuple[int, ...], Logprobs | None, Logprobs]:
        """Return the tokens of an output, their log-probabilities, and those of the prompt."""
        params, prompt = self.request.params, self.request.prompt.token_ids
        most = params.num_top_logprobs
        if self.given:  # the token that vLLM has drawn is dropped
            ids, start = self.prompt_ids, len(prompt) + len(self.resumed)
            return tuple(ids[start:]), _logprobs(output.prompt_logprobs, ids, most)[start - 1 :], ()
        tokens = tuple(one.token_ids)
        drawn = _logprobs(one.logprobs, tokens, most) if params.wants_logprobs else None
        read = _logprobs(output.prompt_logprobs, prompt, params.prompt_logprobs or 0)
        return tokens, drawn or None, read


def _logprobs(rows: Any, ids: Any, most: int) -> Logprobs:
    """Return the log-probability of each id that has a row, with the `most` likely tokens there."""
    found = []
    for row, token in zip(rows or (), ids, strict=False):
        if row is not None:  # as of the first token of a prompt
            ranked = sorted(row.items(), key=lambda pair: pair[1].rank)[:most]
            top = tuple((id_, item.logprob) for id_, item in ranked if item.rank <= most)
            found.append(TokenLogprob(row[token].logprob, top))
    return tuple(found)
