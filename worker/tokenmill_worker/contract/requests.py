"""Requests to an engine: a prompt to continue, in token ids and spans of media.

A request is a msgspec struct, so that the same value travels as a frame to the engine process.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.events import TokenEvent

SEED_MASK: Final = (1 << 64) - 1


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a prompt in whose place the model reads a medium.

    `digest` identifies its content: prompts with equal token ids and other digests are different.
    """

    start: int  # index of its first token
    length: int  # in tokens
    kind: str  # "image"
    digest: bytes  # of its content


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds what a model reads before its answer: token ids, and spans of media in order."""

    token_ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()  # in order; each is an array of its fields

    def __len__(self) -> int:
        return len(self.token_ids)


class Thoughts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Says where the thoughts of an answer begin and end, in token ids. A grammar binds behind
    them. Two examples, of a prompt that opens no thoughts and of one that opens them in a channel:

        <think> Hm, … </think> The answer          start <think>, end </think>
        analysis <|message|> Hm, … <|end|> …       is_open, start <|message|>, end <|end|>

    Args:
        end: ids that end the thoughts. With a budget of 0 they are all that precedes the text.
        closing: ids that alone can follow when the budget is spent; they end with `end`.
        start: the answer's first token if it has thoughts. With `is_open`, the token that ends
            their header, which is not counted.
        is_open: the answer begins within thoughts.
        budget: tokens of thoughts at most; None: no limit.
    """

    end: tuple[int, ...]  # ids that end the thoughts
    closing: tuple[int, ...]  # ids that alone follow a spent budget; they end with `end`
    start: int | None = None  # first token of an answer with thoughts; of open ones: ends a head
    is_open: bool = False  # the answer begins within thoughts
    budget: int | None = None  # tokens of thoughts at most; None: no limit


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt to continue.

    `resumed` holds, per choice, the tokens that an earlier attempt generated and delivered. They
    are prefilled with the prompt, count towards max_tokens and the penalties, and are not reported
    again. `given` holds the tokens of every choice, if they are to be scored and not drawn: the
    events have them with their log-probabilities. `priority` is a class rank; 0 is the most urgent.
    `cache_salt` separates the prefix caches of tenants; the server sets it. `deadline` is a
    time of `time.monotonic`, which the processes of a machine share.
    """

    request_id: str  # of one that runs; a later one may have it again
    prompt: Prompt
    params: SamplingParams = SamplingParams()  # all named; max_tokens and seed may be nil
    priority: int = 1  # 0 interactive, 1 standard, 2 bulk
    tenant: str = ""  # whose turn it takes where tenants take turns
    cache_salt: str = ""  # requests of another salt share no prefix with it
    deadline: float | None = None  # on the machine's monotonic clock, in seconds
    resumed: tuple[tuple[int, ...], ...] = ()  # tokens of each choice from an earlier engine
    thoughts: Thoughts | None = None  # where a grammar or a budget depends on them
    done: tuple[int, ...] = ()  # choices that ended in an earlier attempt; they are not run again
    given: tuple[tuple[int, ...], ...] = ()  # tokens of each choice: to be scored, not drawn

    def open_choices(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return each choice that is to run, with the tokens that it resumes."""
        resumed = dict(enumerate(self.resumed))
        return [
            (choice, resumed.get(choice, ()))
            for choice in range(self.params.n)
            if choice not in self.done
        ]


class RequestError(ValueError):
    """An engine refuses a request; `code` is as in TokenEvent.error_code."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code

    def event(self, request_id: str, choice: int = 0) -> TokenEvent:
        return TokenEvent(
            request_id=request_id,
            choice=choice,
            finish_reason=FinishReason.ERROR,
            error=str(self),
            error_code=self.code,
        )


def answer_limit(
    params: SamplingParams, num_prompt_tokens: int, max_model_len: int, default: int | None
) -> int:
    """Return how many tokens an answer may have: as many as it names, else the default and the rest
    of the model's length allow. Raises RequestError.
    """
    room, wanted = max_model_len - num_prompt_tokens, params.max_tokens
    if wanted is None:
        return room if default is None else min(room, max(default, params.min_tokens))
    if wanted > room:
        raise RequestError(
            f"{num_prompt_tokens} prompt tokens and max_tokens={wanted} make "
            f"{num_prompt_tokens + wanted}; the model's length is {max_model_len}",
            code="context_length_exceeded",
        )
    return wanted


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one choice.

    Choice 0 keeps the request's seed, so that `n` does not change its tokens.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MASK >> 1
