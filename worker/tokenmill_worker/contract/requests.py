"""Requests to an engine: a prompt to continue, in token ids.

A request is a msgspec struct, so that the same value travels as a frame to the engine process.
"""

import msgspec

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.contract.prompt import Prompt


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
    prompt: Prompt
    params: SamplingParams = SamplingParams()
    priority: int = 1
    tenant: str = ""
    cache_salt: str = ""
    deadline: float | None = None
    resumed: tuple[tuple[int, ...], ...] = ()
    thoughts: Thoughts | None = None  # where a grammar or a budget depends on them
    done: tuple[int, ...] = ()  # choices that ended in an earlier attempt; they are not run again
    given: tuple[tuple[int, ...], ...] = ()
