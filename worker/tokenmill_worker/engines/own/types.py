"""The engine's results, its refusals, and the order in which it runs requests."""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from tokenmill_schemas.generation import FinishReason, TokenLogprob

ProgressCallback = Callable[[str, float], None]  # (what is loaded, fraction that is done)


class GenerationOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request.

    With n > 1, `choices` holds all choices and the other fields repeat choice 0.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    choices: tuple["GenerationOutput", ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of each prompt token but the first


class SchedulingPolicy(StrEnum):
    FIFO = "fifo"
    PREFILL_FIRST = "prefill_first"
    PRIORITY = "priority"
