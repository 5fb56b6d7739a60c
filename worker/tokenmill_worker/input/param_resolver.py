"""Resolves a request's sampling parameters: nothing is left unnamed but a seed."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import LOGPROBS_MODES, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.input.refusal import TOO_LONG, Refused
from tokenmill_worker.input.served_model import ServedModel

# of one job: they travel in one chunk, which a subscriber's connection must be able to take
MAX_PROMPT_LOGPROBS: Final = 262_144


class ParamResolver:
    """Completes the parameters of requests by the defaults and the length of one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def resolve(
        self,
        request: JobRequest,
        chunks: list[Chunk],
        num_prompt_tokens: int,
        given: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        """Return the complete parameters of a job that goes to the engine.

        Args:
            chunks: what the job's log holds.
            given: the tokens of its continuations.

        Raises:
            Refused: prompt and answer together exceed the model's length, or the prompt has too
                many log-probabilities.
        """
        defaults = self._defaults(chunks)
        most = (
            max(map(len, given))
            if given
            else self._max_tokens(request, num_prompt_tokens, defaults.max_tokens)
        )
        params = _completed(request, defaults, most)
        _check_scores(params, num_prompt_tokens)
        return params

    def resolve_logged(self, request: JobRequest, chunks: list[Chunk]) -> SamplingParams:
        """Return the parameters by which a logged answer is read; its length is not checked."""
        defaults = self._defaults(chunks)
        most = request.params.max_tokens or defaults.max_tokens
        return _completed(request, defaults, most)

    def _defaults(self, chunks: list[Chunk]) -> SamplingParams:
        """Return what holds where a request names nothing.

        An answer that has begun keeps the parameters of its first worker, whose model may have
        other defaults. A log without parameters was begun by a worker that knew no such defaults.
        """
        limit = self._model.default_max_tokens
        if chunks:
            return chunks[0].params or SamplingParams(max_tokens=limit)
        defaults = self._model.sampling_defaults
        return defaults if limit is None else msgspec.structs.replace(defaults, max_tokens=limit)

    def _max_tokens(self, request: JobRequest, num_prompt_tokens: int, default: int | None) -> int:
        room = self._model.max_model_len - num_prompt_tokens
        wanted = request.params.max_tokens
        if wanted is None:
            return room if default is None else min(room, max(default, request.params.min_tokens))
        if wanted > room:
            raise Refused(
                f"{num_prompt_tokens} prompt tokens and max_tokens={wanted} "
                f"make {num_prompt_tokens + wanted}; "
                f"the model's length is {self._model.max_model_len}",
                TOO_LONG,
            )
        return wanted


def _check_scores(params: SamplingParams, num_prompt_tokens: int) -> None:
    if params.prompt_logprobs is None:
        return
    count = num_prompt_tokens * (1 + params.prompt_logprobs)
    if count > MAX_PROMPT_LOGPROBS:
        raise Refused(
            f"{num_prompt_tokens} prompt tokens with prompt_logprobs={params.prompt_logprobs} have "
            f"{count} log-probabilities; the limit is {MAX_PROMPT_LOGPROBS}"
        )


def _completed(
    request: JobRequest, defaults: SamplingParams, max_tokens: int | None
) -> SamplingParams:
    """Return the request's parameters with nothing left unnamed but the seed, which may follow from
    the job's id. Continuations are the choices of an answer with log-probabilities.
    """
    params = msgspec.structs.replace(request.params.with_defaults(defaults), max_tokens=max_tokens)
    if params.echo and params.wants_logprobs and params.prompt_logprobs is None:
        params = msgspec.structs.replace(params, prompt_logprobs=params.num_top_logprobs)
    if not request.continuations:
        return params
    return msgspec.structs.replace(
        params,
        n=len(request.continuations),
        logprobs=params.logprobs if params.wants_logprobs else True,
        logprobs_mode=LOGPROBS_MODES[0],
        ignore_eos=True,
    )


def seed_of(job_id: str) -> int:
    """Return the seed of a job that names none. It is the same at every delivery, so that a resumed
    answer continues as it would have.
    """
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "big") >> 1
