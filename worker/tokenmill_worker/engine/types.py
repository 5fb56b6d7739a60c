"""The engine's inputs and outputs: requests; token events, capacity and statistics.

They are msgspec structs, so that the same values travel as frames to and from the engine process.
They hold token ids, no text.
"""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob

ProgressCallback = Callable[[str, float], None]  # (what is loaded, fraction that is done)


class Thoughts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Says where the thoughts of an answer begin and end, in token ids. A grammar binds behind
    them.

    `is_open`: the answer begins within thoughts; else they begin if its first token is `start`, and
    without that token there are none. They end with the ids `end`. After `budget` tokens of
    thoughts, only `closing` can follow, which ends with `end`; None: no limit. With `is_open` and
    `start`, the tokens before `start` are a header and are not counted. If the budget is 0, the ids
    `end` are the whole answer before the text.
    """

    end: tuple[int, ...]
    closing: tuple[int, ...]
    start: int | None = None
    is_open: bool = False
    budget: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt to continue.

    `resumed` holds, per choice, the tokens that an earlier attempt generated and delivered. They
    are prefilled with the prompt, count towards max_tokens and the penalties, and are not reported
    again. `given` holds the tokens of every choice, if they are to be scored and not drawn: the
    events have them with their log-probabilities. `priority` is a class rank; 0 is the most urgent.
    `cache_salt` separates the prefix caches of tenants; the server sets it. `deadline` is a
    time of `time.monotonic`, which the processes of a machine share.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    priority: int = 1
    tenant: str = ""
    cache_salt: str = ""
    deadline: float | None = None
    resumed: tuple[tuple[int, ...], ...] = ()
    thoughts: Thoughts | None = None  # where a grammar or a budget depends on them
    done: tuple[int, ...] = ()  # choices that ended in an earlier attempt; they are not run again
    given: tuple[tuple[int, ...], ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The result of one step for one choice of a request: zero or more tokens, possibly its end.

    `num_cached_tokens` is set on the first event of a choice. `error` is one sentence for the user,
    set when finish_reason is ERROR.
    """

    request_id: str
    choice: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    preemptions: int = 0
    error: str | None = None
    error_code: str | None = None  # "invalid_request", "context_length_exceeded", "engine_error"
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of further tokens of the prompt


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences, blocks and places that the engine has free now.

    `waiting` requests are admitted but not running yet. `free_urgent` is the number of places for
    interactive requests: free ones and those of bulk work, whatever else waits, minus interactive
    requests that wait already.
    """

    free_sequences: int
    free_blocks: int
    waiting: int
    running: int
    block_size: int
    max_model_len: int
    free_urgent: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters since the start, and current gauges (`num_running`, `num_waiting`, `blocks_*`)."""

    steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_offloaded: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0  # free blocks that still hold a cached prefix
    prompt_tokens: int = 0  # of admitted requests
    computed_tokens: int = 0  # through the model, prefill and decode
    generated_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prefix_queries: int = 0  # tokens looked up
    preemptions: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    recomputed_tokens: int = 0
    evicted_blocks: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished: int = 0
    failed_steps: int = 0
    busy_s: float = 0.0  # time inside steps


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


class RequestError(ValueError):
    """The engine refuses a request; `code` is as in TokenEvent.error_code."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class SchedulingPolicy(StrEnum):
    FIFO = "fifo"
    PREFILL_FIRST = "prefill_first"
    PRIORITY = "priority"
