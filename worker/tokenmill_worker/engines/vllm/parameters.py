"""Translates a choice's parameters into vLLM's. What vLLM cannot do, the capabilities name.

vLLM reads the resumed tokens of an answer as prompt, so what counts an answer's tokens is corrected
here: its limits, and by biases its penalties.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any, Final

import msgspec
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tokenmill_worker.contract.requests import choice_seed
from tokenmill_worker.engines.vllm.bound_answer import EXTRA, BoundAnswer
from tokenmill_worker.engines.vllm.choices import VllmChoice
from tokenmill_worker.engines.vllm.config import MAX_BIASES, MAX_STOP_IDS

_SEEDS: Final = (1 << 63) - 1  # vLLM takes signed ones
FORBIDDEN: Final = -1e9  # bias of a token that must not occur
_NEVER_TEXT: Final[dict[str, Any]] = {
    "detokenize": False,
    "output_kind": RequestOutputKind.DELTA,
    "skip_clone": True,  # these objects are made for one choice
}


def sampling_params(
    item: VllmChoice, eos: tuple[int, ...], *, has_position_seeds: bool, has_biases: bool
) -> SamplingParams:
    """Return vLLM's parameters of a choice. Raises ValueError for what vLLM has no room for.

    Without `has_position_seeds` a seed is another one behind each place, because the first draws
    would repeat themselves. Without `has_biases` the penalties count from the place on.
    """
    params, num_resumed = item.request.params, len(item.resumed)
    if item.given:
        return SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=params.num_top_logprobs, **_NEVER_TEXT
        )
    if params.min_tokens and len({*params.stop_token_ids, *eos}) > MAX_STOP_IDS:
        raise ValueError(f"beside min_tokens, vLLM takes {MAX_STOP_IDS} stop_token_ids")
    numbers, seed = params.numbers, params.seed
    if seed is not None:
        seed = choice_seed(seed & _SEEDS, item.index)
        if num_resumed and not has_position_seeds:
            seed = choice_seed(seed, num_resumed + 1)
    is_greedy = numbers.temperature == 0.0
    return SamplingParams(
        max_tokens=item.limit - num_resumed,
        min_tokens=max(0, min(params.min_tokens, item.limit) - num_resumed),
        temperature=numbers.temperature,
        top_p=numbers.top_p or 1.0,
        top_k=1 if numbers.top_p == 0.0 and not is_greedy else max(0, numbers.top_k),
        min_p=numbers.min_p,
        seed=seed,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=numbers.repetition_penalty,
        logit_bias=_biases(item, has_biases) or None,
        logprobs=params.num_top_logprobs if params.wants_logprobs else None,
        prompt_logprobs=params.prompt_logprobs if item.index == 0 and not num_resumed else None,
        **_constrained(item),
        **_NEVER_TEXT,
    )


def _biases(item: VllmChoice, has_biases: bool) -> dict[int, float]:
    """Return the biases that a request names, less what its penalties take from resumed tokens.

    vLLM adds biases, then divides a logit above 0 by the repetition penalty. So the penalties are
    exact for each token whose logit is above 0 also behind them.
    """
    params = item.request.params
    biases = dict(params.logit_bias) | dict.fromkeys(params.suppress_tokens, FORBIDDEN)
    if len(biases) > MAX_BIASES:
        raise ValueError(f"logit_bias and suppress_tokens may have {MAX_BIASES} ids with vLLM")
    presence, frequency = params.presence_penalty, params.frequency_penalty
    if not has_biases or not (presence or frequency):
        return biases
    factor = params.numbers.repetition_penalty
    penalties = {
        token: factor * (presence + frequency * count)
        for token, count in Counter(item.resumed).items()
    }
    greatest = heapq.nlargest(
        MAX_BIASES - len(biases), penalties, key=lambda token: abs(penalties[token])
    )
    return biases | {token: biases.get(token, 0.0) - penalties[token] for token in greatest}


def _constrained(item: VllmChoice) -> dict[str, Any]:
    """Name our grammar; vLLM itself learns only that there is one."""
    request = item.request
    form, thoughts = request.params.response_format, request.thoughts
    if form is None and thoughts is None:
        return {}
    answer = BoundAnswer(form, thoughts, len(item.resumed), request.tenant, item.key)
    return {
        "structured_outputs": StructuredOutputsParams(json_object=True),
        "extra_args": {EXTRA: msgspec.json.encode(answer).decode()},
    }
