"""Events of an engine: the tokens of a step, its free places, its counters.

They are msgspec structs, so that the same values travel as frames from the engine process.
"""

import msgspec

from tokenmill_schemas.generation import FinishReason, TokenLogprob


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The result of one step for one choice of a request: zero or more tokens, possibly its end.

    `num_cached_tokens` is set on the first event of a choice. `error` is one sentence for the user,
    set when finish_reason is ERROR.
    """

    request_id: str
    choice: int = 0
    token_ids: tuple[int, ...] = ()  # new ones, an end token included
    logprobs: tuple[TokenLogprob, ...] | None = None  # of each new token, where asked for
    finish_reason: FinishReason | None = None  # the choice has ended
    num_cached_tokens: int = 0  # of the prompt, found in a cache; on a choice's first event
    preemptions: int = 0  # of this choice so far
    error: str | None = None  # one sentence for the user, where finish_reason is "error"
    error_code: str | None = None  # "invalid_request", "context_length_exceeded", "engine_error"
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of further tokens of the prompt


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences, blocks and places that the engine has free now.

    `waiting` requests are admitted but not running yet. `free_urgent` is the number of places for
    interactive requests: free ones and those of bulk work, whatever else waits, minus interactive
    requests that wait already.
    """

    free_sequences: int  # choices that could start now
    free_blocks: int  # of the KV cache
    waiting: int  # choices that wait for a place
    running: int  # choices that have one
    block_size: int  # in tokens
    max_model_len: int  # in tokens
    free_urgent: int = 0  # places for interactive choices: free ones, and those of bulk work


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
    disk_blocks_read: int = 0  # from the cache on disk
    disk_blocks_missed: int = 0  # of prompts, looked for on disk and not there
    disk_blocks_written: int = 0
    disk_failures: dict[str, int] = {}  # by reason: busy, damaged, full, io, slow
