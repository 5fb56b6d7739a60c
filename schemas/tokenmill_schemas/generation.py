"""Parameters of a generation, and the reasons why one ends.

This is the only module of `schemas` that the engine may import: it has token-level terms, no queue
and no text store. Names follow the sampling parameters of OpenAI and vLLM.
"""

from enum import StrEnum
from typing import Final, Literal, get_args

import msgspec

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
LOGPROBS_MODES: Final[tuple[str, ...]] = get_args(LogprobsMode)


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed; what was generated is kept
    ERROR = "error"


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Structured output. Exactly one of the three formats is set; `json_schema={}` allows any JSON
    object.
    """

    json_schema: dict[str, object] | None = None
    regex: str | None = None
    grammar: str | None = None  # EBNF, as xgrammar reads it
    strict: bool = True  # json_schema: refuse what cannot be enforced; False: enforce what can


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request. The defaults sample from the model's own distribution.

    `temperature=0` is greedy. `top_p=0` keeps only the most likely token. `top_k=0` and `-1` both
    switch top-k off. `max_tokens=None` means up to the model's context length. `logprobs=True`
    returns the log-probability of each sampled token; an integer k, or `top_logprobs=k`, adds the k
    most likely tokens. With `logprobs_mode="raw_logprobs"` they are those of the model's
    distribution, with "processed_logprobs" those of the distribution that the token was drawn from
    (after penalties, bias, temperature and truncation); None: as the worker's setting says.
    `seed=None` draws a seed at admission.
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
    logprobs_mode: str | None = (
        None  # raw_logprobs or processed_logprobs; nil: the worker's setting
    )

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
    """Natural-log probability of one sampled token, and of the most likely tokens at its
    position.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most likely first
