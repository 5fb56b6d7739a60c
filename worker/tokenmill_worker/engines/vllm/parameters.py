"""Translates a request's parameters into vLLM's. What vLLM cannot do, the capabilities name."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tokenmill_schemas.generation import TokenLogprob
from tokenmill_worker.contract.requests import GenerationRequest, choice_seed
from tokenmill_worker.engines.vllm.bound_answer import EXTRA, BoundAnswer

_SEEDS: Final = (1 << 63) - 1  # vLLM takes signed ones
FORBIDDEN: Final = -1e9  # bias of a token that must not occur
_NEVER_TEXT: Final[dict[str, Any]] = {
    "detokenize": False,
    "output_kind": RequestOutputKind.DELTA,
    "skip_clone": True,  # these objects are made for one choice
}


def sampling_params(
    request: GenerationRequest,
    choice: int,
    resumed: tuple[int, ...],
    limit: int,
    key: str,
    *,
    eos: tuple[int, ...],
    has_position_seeds: bool,
) -> SamplingParams:
    """Return vLLM's parameters of one choice of at most `limit` tokens, which continues behind the
    tokens `resumed`.

    vLLM reads resumed tokens as prompt, so what counts an answer's tokens is corrected: the limits
    here, a frequency penalty by a bias. A presence penalty counts a token twice that occurs in both
    parts. Without `has_position_seeds` a seed is another one behind each place, because the first
    draws would repeat themselves.
    """
    params = request.params
    if request.given:
        return SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=params.num_top_logprobs, **_NEVER_TEXT
        )
    numbers = params.numbers
    seed = params.seed
    if seed is not None:
        seed = choice_seed(seed & _SEEDS, choice)
        if resumed and not has_position_seeds:
            seed = choice_seed(seed, len(resumed) + 1)
    is_greedy = numbers.temperature == 0.0
    return SamplingParams(
        max_tokens=limit - len(resumed),
        min_tokens=max(0, min(params.min_tokens, limit) - len(resumed)),
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
        logit_bias=_biases(request, resumed) or None,
        logprobs=params.num_top_logprobs if params.wants_logprobs else None,
        prompt_logprobs=params.prompt_logprobs if choice == 0 and not resumed else None,
        **_constrained(request, len(resumed), key, eos),
        **_NEVER_TEXT,
    )


def _biases(request: GenerationRequest, resumed: tuple[int, ...]) -> dict[int, float]:
    params = request.params
    biases = {int(token): float(bias) for token, bias in params.logit_bias.items()}
    for token in resumed if params.frequency_penalty else ():
        biases[token] = biases.get(token, 0.0) - params.frequency_penalty
    if params.presence_penalty:
        for token in set(resumed):
            biases[token] = biases.get(token, 0.0) - params.presence_penalty
    return biases | dict.fromkeys(params.suppress_tokens, FORBIDDEN)


def _constrained(
    request: GenerationRequest, num_resumed: int, key: str, eos: tuple[int, ...]
) -> dict[str, Any]:
    """Name our grammar; vLLM itself learns only that there is one."""
    form, thoughts = request.params.response_format, request.thoughts
    if form is None and thoughts is None:
        return {}
    answer = msgspec.json.encode(
        BoundAnswer(form, thoughts, num_resumed, eos, request.tenant, key)
    ).decode()
    return {
        "structured_outputs": StructuredOutputsParams(json_object=True),
        "extra_args": {EXTRA: answer},
    }


def logprob_of(entry: dict[int, Any], token: int, most: int) -> TokenLogprob:
    """Return the log-probability of `token` at one position, and the `most` likely tokens there."""
    ranked = sorted(
        (item.rank, id_, item.logprob) for id_, item in entry.items() if item.rank <= most
    )
    return TokenLogprob(
        entry[token].logprob, tuple((id_, value) for _, id_, value in ranked[:most])
    )
