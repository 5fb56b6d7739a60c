"""What a generation is asked to do, and how one ended.

The only part of `schemas` that the engine may import: token-level vocabulary, no queue, no text store.
Names follow the OpenAI and vLLM sampling parameters.
"""

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a sequence stopped growing."""

    STOP = "stop"  # end-of-sequence token, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed; what was generated is kept
    ERROR = "error"


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Structured output: exactly one of the three is set (`json_schema={}` admits any JSON object)."""

    json_schema: dict[str, object] | None = None
    regex: str | None = None
    grammar: str | None = None  # EBNF, as xgrammar reads it
    strict: bool = True  # of json_schema: refuse what the grammar cannot enforce; False: enforce what it can


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Per-request sampling. The defaults draw from the model's own distribution.

    `temperature=0` is greedy. `top_p=0` keeps the most likely token alone. `top_k=0` and `-1` both mean "off".
    `max_tokens=None` means "up to the model's length". `logprobs=True` returns the sampled token's
    log-probability; an integer k, or `top_logprobs=k`, returns the k most likely ones with it. `seed=None`
    draws a seed at admission.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: bool | int = False
    top_logprobs: int = 0
    n: int = 1
    response_format: ResponseFormat | None = None
    speculate: bool = True  # may draft tokens be proposed for this request?
    lora: str = ""  # name of the LoRA adapter to answer with; empty: the model itself

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not False or self.top_logprobs > 0

    @property
    def num_top_logprobs(self) -> int:
        return max(self.top_logprobs, 0 if isinstance(self.logprobs, bool) else self.logprobs)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one sampled token, and of the most likely ones at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most likely first
