"""Parameters of a generation, and the reasons why one ends.

This is the only module of `schemas` that the engine may import: it has token-level terms, no queue
and no text store. Names follow the sampling parameters of OpenAI and vLLM.
"""

from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from typing import Final, NamedTuple

import msgspec

LOGPROBS_MODES: Final = ("raw_logprobs", "processed_logprobs")
MAX_SEQUENCES: Final = 1_024
MAX_SEQUENCE_IDS: Final = 32_768  # of one field; their MessagePack is below MAX_FORMAT_CHARS
MAX_NGRAM: Final = 256


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed; what was generated is kept
    ERROR = "error"
    TOOL_CALLS = "tool_calls"  # it called tools, and every call is complete


class CallableTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that an answer may call. `strict`: refuse a schema that cannot be enforced."""

    name: str
    schema: dict[str, object]
    strict: bool = False


class ArgumentForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of arguments that are written one by one: `before`, the name, `after`, the value,
    `end`; further ones follow `separator`. Values are JSON but for two cases.
    """

    before: str = ""
    after: str
    end: str = ""
    separator: str = ""
    has_plain_texts: bool = False  # a value that is a text stands without quotes
    words: dict[str, str] = {}  # what stands for the values true, false and null


class CallGrammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of an answer that may call tools, in one model's format.

    A call is `before`, the name, `after`, the arguments, `end`. The first follows
    `trigger`, which ends the free text; each further one follows `separator` (None: there is none);
    `closing` follows the last. `marks` are the parts of these texts that are one token each, with
    its id. `is_required`: the answer begins with a call. `at_start`: the answer begins with the
    trigger, or calls nothing. Where messages have heads, `asides` are those of messages that may
    come before, each ended by `aside_end`, and `answer` is that of the free text; the trigger is
    another head.
    """

    trigger: str
    before: str
    after: str
    end: str
    tools: tuple[CallableTool, ...]
    separator: str | None = None
    closing: str = ""
    marks: dict[str, int] = {}
    is_required: bool = False
    arguments: ArgumentForm | None = None  # left out: one JSON object
    at_start: bool = False
    asides: tuple[str, ...] = ()
    aside_end: str = ""
    answer: str = ""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Structured output. Exactly one of the formats is set; `json_schema={}` allows any JSON
    object. Beside `calls`, `json_schema` binds an answer that calls no tools.
    """

    json_schema: dict[str, object] | None = None
    regex: str | None = None
    grammar: str | None = None  # EBNF, as xgrammar reads it
    calls: CallGrammar | None = None  # set by the worker, from the tools of a request
    strict: bool = True  # json_schema: refuse what cannot be enforced; False: enforce what can
    structural_tag: dict[str, object] | None = None  # free text and tags, as xgrammar reads them


class SamplingNumbers(NamedTuple):
    """The parameters for which a model may have defaults of its own. The values here are neutral:
    they sample from the model's distribution.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request.

    A parameter that is None is not named: the worker takes the default of the model's
    generation_config.json, or else the neutral value of SamplingNumbers. `temperature=0` is greedy.
    `top_p=0` keeps only the most likely token. `top_k=0` and `-1` both switch top-k off. Without
    `max_tokens` and a default for it, an answer may fill the model's context. `logprobs=True`
    returns the log-probability of each sampled token; an integer k, or `top_logprobs=k`, adds the k
    most likely tokens. With `logprobs_mode="raw_logprobs"` they are those of the model's
    distribution, with "processed_logprobs" those of the distribution that the token was drawn from
    (after penalties, bias, temperature and truncation); None: as the worker's setting says.
    `prompt_logprobs=k` returns the log-probability of each token of the prompt but the first, and
    of the k most likely tokens there, always of the model's distribution. With `echo` and
    `logprobs` the prompt has as many of them, unless `prompt_logprobs` says otherwise. `seed=None`
    draws a seed at admission. A seed has 64 bits, and a negative one draws as that plus 2^64.

    The last seven are Transformers', for which prompt and answer are one sequence. A bias of
    `sequence_bias` is added to the last token of its ids where the others precede it; the last
    token of a word of `bad_words_ids` is forbidden there, unless the word is one token that ends
    the answer. A forced token and `no_repeat_ngram_size` give way where the response format allows
    nothing else.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    logprobs: bool | int = False
    top_logprobs: int = 0
    n: int = 1
    response_format: ResponseFormat | None = None
    speculate: bool = True  # may draft tokens be proposed for this request?
    lora: str = ""  # name of the LoRA adapter to answer with; empty: the model itself
    logprobs_mode: str | None = None  # raw_logprobs or processed_logprobs; left out: raw_logprobs
    thinking_budget: int | None = None  # after so many tokens of thoughts the answer begins
    prompt_logprobs: int | None = None  # of each prompt token, beside this many most likely ones
    echo: bool = False  # does the text of each answer begin with the prompt's?
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # sequences that do not occur
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()  # sequences and their biases
    no_repeat_ngram_size: int | None = None  # no sequence of so many tokens occurs twice
    suppress_tokens: tuple[int, ...] = ()  # tokens that do not occur
    begin_suppress_tokens: tuple[int, ...] = ()  # not as the first token that is not forced
    forced_bos_token_id: int | None = None  # the first token of the answer
    forced_eos_token_id: int | tuple[int, ...] | None = None  # its token number max_tokens

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def numbers(self) -> SamplingNumbers:
        """The values to draw by; those that are not named are neutral."""
        named = {name: getattr(self, name) for name in SamplingNumbers._fields}
        return SamplingNumbers(
            **{name: value for name, value in named.items() if value is not None}
        )

    def with_defaults(self, defaults: "SamplingParams") -> "SamplingParams":
        """Return these parameters with nothing left unnamed but `max_tokens` and `seed`: what the
        request does not name has the value of `defaults`, or else the neutral one.
        """
        values = {
            name: given if (given := getattr(self, name)) is not None else value
            for name, value in defaults.numbers._asdict().items()
        }
        mode = self.logprobs_mode or LOGPROBS_MODES[0]
        return msgspec.structs.replace(self, **values, logprobs_mode=mode)

    def without_content(self) -> "SamplingParams":
        """Return these parameters as logs and results repeat them: without what may be long or
        quote a prompt.
        """
        return msgspec.structs.replace(
            self, stop=(), logit_bias={}, response_format=None, bad_words_ids=(), sequence_bias=(),
            suppress_tokens=(), begin_suppress_tokens=(),
        )  # fmt: skip

    @property
    def edits_tokens(self) -> bool:
        """Return whether any parameter favours, forbids or forces tokens by their ids."""
        ends = len(self.stop_token_ids)
        return bool(self.no_repeat_ngram_size) or sum(map(len, self.named_ids.values())) > ends

    @property
    def named_ids(self) -> dict[str, tuple[int, ...]]:
        """The token ids in these parameters, by the field that holds them."""
        bos, eos = self.forced_bos_token_id, self.forced_eos_token_id
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(self.logit_bias),
            "bad_words_ids": tuple(chain.from_iterable(self.bad_words_ids)),
            "sequence_bias": tuple(chain.from_iterable(ids for ids, _ in self.sequence_bias)),
            "suppress_tokens": self.suppress_tokens,
            "begin_suppress_tokens": self.begin_suppress_tokens,
            "forced_bos_token_id": () if bos is None else (bos,),
            "forced_eos_token_id": () if eos is None else (eos,) if isinstance(eos, int) else eos,
        }

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not False or self.top_logprobs > 0

    @property
    def num_top_logprobs(self) -> int:
        return max(self.top_logprobs, 0 if isinstance(self.logprobs, bool) else self.logprobs)


NO_DEFAULTS: Final = SamplingParams()  # of a model that says nothing


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one sampled or given token, and of the most likely tokens at its
    position.

    Bytes are those of the token alone, UTF-8 except where a token is a part of a character. A
    special token has those of its name. The engine leaves them out; the worker adds them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most likely first
    token_bytes: bytes = b""  # of the token itself
    top_bytes: tuple[bytes, ...] = ()  # of each token of `top`


def token_text(data: bytes) -> str:
    """Return a token's bytes as text. Bytes that are no whole character are written as `\\xe2`."""
    return data.decode("utf-8", "backslashreplace")


def sequence_problems(params: SamplingParams) -> Iterator[str]:
    """Yield a sentence for each problem of sequences, n-grams and forced tokens, whatever the
    model.
    """
    ids = params.named_ids
    biased = tuple(pair[0] for pair in params.sequence_bias)
    for name, sequences in (("bad_words_ids", params.bad_words_ids), ("sequence_bias", biased)):
        if len(sequences) > MAX_SEQUENCES:
            yield f"{name} may have {MAX_SEQUENCES} entries, not {len(sequences)}"
        if not all(sequences):
            place = list(map(bool, sequences)).index(False)
            yield f"{name}[{place}] must have at least one id"
    for name in ("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"):
        if len(ids[name]) > MAX_SEQUENCE_IDS:
            yield f"{name} may have {MAX_SEQUENCE_IDS} ids, not {len(ids[name])}"
    too_high = [bias for _, bias in params.sequence_bias if not bias <= 1e4]  # NaN is refused too
    if too_high:
        yield f"sequence_bias may have biases of at most 10000, not {too_high[0]}"
    size = params.no_repeat_ngram_size
    if size is not None and not 1 <= size <= MAX_NGRAM:
        yield f"no_repeat_ngram_size must be from 1 to {MAX_NGRAM}, not {size}"
    yield from _forced_problems(params)


def _forced_problems(params: SamplingParams) -> Iterator[str]:
    if params.forced_eos_token_id == ():
        yield "forced_eos_token_id must have at least one id"
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if forced := set(params.named_ids[name]).intersection(params.suppress_tokens):
            yield f"{name} {min(forced)} is in suppress_tokens, so it cannot be forced"
