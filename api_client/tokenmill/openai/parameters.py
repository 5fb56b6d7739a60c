"""Sorts the parameters of a request's body by what they mean, and refuses the others by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenmill.openai.form_values import FormError

# sampling parameters that have one name in every form of a body and in a job: OpenAI's, then those
# that vLLM and Transformers add
SAMPLING: Final = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
    "thinking_budget", "logprobs_mode", "bad_words_ids", "sequence_bias", "no_repeat_ngram_size",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
# what vLLM adds besides them → the values with which nothing is asked for
VLLM_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
}
# what changes no answer
LABELS: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_options",
    "prompt_cache_retention",
})  # fmt: skip
SESSION: Final = "prompt_cache_key"  # names the job's session


def require(body: Mapping[str, Any], name: str) -> None:
    """Raise FormError for a body without this parameter."""
    if name not in body:
        raise FormError(
            f"Missing required parameter: {name!r}.", name, "missing_required_parameter"
        )


def refuse_effect(name: str, value: object, neutral: tuple[object, ...]) -> None:
    """Raise FormError for a value that would have an effect."""
    if value not in neutral:
        raise FormError(f"{name!r} is not supported here", name, "unsupported_parameter")


def unrecognized(name: str) -> FormError:
    word = name[:64]
    return FormError(f"Unrecognized request argument supplied: {word}", word, "unknown_parameter")
